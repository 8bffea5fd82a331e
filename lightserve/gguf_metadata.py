"""The key-value section of a .gguf file, read in a tenth of a second.

``gguf.GGUFReader`` makes several arrays per string, three seconds for a vocabulary of 49,152; this reader makes one
``str``. It stops before the tensors. Format, versions 2 and 3: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lightserve.errors import ConfigError

GgufValue: TypeAlias = bool | int | float | str | list[Any]

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_HEADER = struct.Struct("<4sIQQ")


def read_gguf_metadata(path: Path) -> dict[str, GgufValue]:
    """Read every key of a .gguf file's header.

    Returns:
        Numbers and strings as Python's own, arrays as lists, in the file's order.

    Raises:
        ConfigError: The file cannot be read, is not GGUF of version 2 or 3, or ends early.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _MetadataReader(data).read()
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{path}: cannot read it as GGUF: {error}") from error


class _MetadataReader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> dict[str, GgufValue]:
        magic, version, _, num_keys = self._take(_HEADER)
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        return {self._string(): self._value(*self._take(_U32)) for _ in range(num_keys)}

    def _value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._numbers(kind, 1)[0]  # type: ignore[no-any-return]

    def _array(self) -> list[Any]:
        (kind,) = self._take(_U32)
        (length,) = self._take(_U64)
        if kind == _STRING:
            return self._strings(length)
        if kind == _ARRAY:
            return [self._array() for _ in range(length)]
        return self._numbers(kind, length)

    def _numbers(self, kind: int, length: int) -> list[Any]:
        if kind not in _NUMBERS:
            raise ValueError(f"value type {kind} at byte {self._at}")
        dtype = np.dtype(_NUMBERS[kind])
        start = self._at
        self._at += length * dtype.itemsize
        values: list[Any] = np.frombuffer(self._data[start : self._at], dtype, count=length).tolist()
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        data, at, unpack = self._data, self._at, _U64.unpack_from
        strings = []
        for _ in range(count):
            (length,) = unpack(data, at)
            start = at + 8
            at = start + length
            if at > len(data):
                raise ValueError(f"string of {length} bytes at byte {start} runs past the end")
            strings.append(str(data[start:at], "utf-8", "replace"))
        self._at = at
        return strings

    def _take(self, fields: struct.Struct) -> tuple[Any, ...]:
        start = self._at
        self._at += fields.size
        return fields.unpack_from(self._data, start)
