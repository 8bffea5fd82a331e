"""Weights in safetensors files, one or sharded, mapped into memory and never copied as a whole."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from lightserve.errors import ConfigError
from lightserve.model_worker.weights.layout import Piece
from lightserve.safetensors_index import INDEX, SINGLE, read_index

_DTYPES = ("F32", "F16", "BF16")
_GIT_LFS_MARK = b"version https://git-lfs"


class _OpenFile(Protocol):
    """What we use of a safetensors handle; the library gives it no types."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> Any: ...


class SafetensorsFiles:
    """The tensors of a model folder: of the files its index names, or of ``model.safetensors``; no others.

    Args:
        folder: The model folder.

    Raises:
        ConfigError: Weights are missing, incomplete, damaged, or only there in a pickled form.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, _OpenFile] = {}
        self._file_of: dict[str, str] = read_index(folder) or {}
        if self._file_of:
            for file_name in sorted(set(self._file_of.values())):
                self._files[file_name] = _open(folder / file_name)
            self._check_index()
        else:
            self._files[SINGLE] = _open(_single_file(folder))
            self._file_of = dict.fromkeys(self._files[SINGLE].keys(), SINGLE)

    @property
    def origin(self) -> str:
        """The folder."""
        return str(self.folder)

    @property
    def names(self) -> Collection[str]:
        """Every tensor."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape.

        Raises:
            ConfigError: Its numbers are of another kind than 16 or 32-bit floating point.
        """
        stored = self._files[self._file_of[name]].get_slice(name)
        if stored.get_dtype() not in _DTYPES:
            path = self.folder / self._file_of[name]
            raise ConfigError(f"{path}: tensor {name} is {stored.get_dtype()}; supported: {', '.join(_DTYPES)}")
        return tuple(stored.get_shape())

    def read(self, piece: Piece) -> torch.Tensor:
        """Return a view of the mapped file, in the stored dtype."""
        stored = self._files[self._file_of[piece.name]].get_slice(piece.name)
        rows = slice(piece.rows.start, piece.rows.stop)
        if piece.columns is None:
            block: torch.Tensor = stored[rows]
        else:
            block = stored[rows, piece.columns.start : piece.columns.stop]
        return block

    def _check_index(self) -> None:
        held = {file_name: set(file.keys()) for file_name, file in self._files.items()}
        for name, file_name in self._file_of.items():
            if name not in held[file_name]:
                raise ConfigError(f"{self.folder / file_name}: tensor {name} is missing, which {INDEX} places there")


def _single_file(folder: Path) -> Path:
    path = folder / SINGLE
    if path.exists():
        return path
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        raise ConfigError(
            f"{folder}: has its weights only as {pickled[0]}, a pickle, which could run code; convert it to safetensors"
        )
    raise ConfigError(f"{folder}: has neither {INDEX} nor {SINGLE}")


def _open(path: Path) -> _OpenFile:
    try:
        with path.open("rb") as start:
            if start.read(len(_GIT_LFS_MARK)) == _GIT_LFS_MARK:
                raise ConfigError(f"{path}: is a Git LFS pointer, not the weights themselves; run git lfs pull")
        file: _OpenFile = safe_open(path, framework="pt", device="cpu")
        return file
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ConfigError(f"{path}: damaged or cut short ({error})") from error
