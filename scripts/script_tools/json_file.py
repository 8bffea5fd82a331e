"""Results as a file for programs, which people can read too."""

from pathlib import Path
from typing import Any

import msgspec


def write_json(path: Path, value: Any) -> None:
    """Write anything made of dataclasses, structs, paths and plain values; what JSON does not have becomes null."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value, enc_hook=_as_plain), indent=2) + b"\n")


def _as_plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"JSON cannot hold a {type(value).__name__}")
