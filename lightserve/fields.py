"""Untrusted key/value facts from a file, read one checked value at a time."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lightserve.errors import ConfigError

MAX_SIZE = 2**31 - 1  # sizes and ids beyond int32 are damage


class Fields:
    """A mapping that came from a file. Every complaint is a ``ConfigError`` that names the file and the key.

    A key that is absent and one that is null read the same: the default, or a complaint where there is none.
    """

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self._values = values

    @classmethod
    def from_json(cls, path: Path) -> "Fields":
        """Read a JSON object.

        Raises:
            ConfigError: The file cannot be read, is not JSON or not an object.
        """
        try:
            values = msgspec.json.decode(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid JSON ({error})") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: must hold a JSON object")
        return cls(str(path), values)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def raw(self, key: str) -> Any:
        """Return the unchecked value, or None."""
        return self._values.get(key)

    def refusal(self, key: str, reason: str) -> ConfigError:
        """Make the error that says what is wrong with a key."""
        return ConfigError(f"{self.source}: {key} {reason}")

    def count(self, key: str, default: int | None = None, *, at_most: int = MAX_SIZE) -> int:
        """Read a size: an integer of at least 1."""
        value = self._required(key, default)
        if type(value) is not int or not 1 <= value <= at_most:
            raise self.refusal(key, f"must be an integer from 1 to {at_most}, not {_shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read a finite number above 0."""
        value = self._required(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.refusal(key, f"must be a finite number above 0, not {_shown(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Read true or false."""
        value = self._required(key, default)
        if type(value) is not bool:
            raise self.refusal(key, f"must be true or false, not {_shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Read a string."""
        value = self._required(key, default)
        if type(value) is not str:
            raise self.refusal(key, f"must be a string, not {_shown(value)}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Read one token id, a list of them, or nothing."""
        value = self._values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(token_id) is not int or not 0 <= token_id <= MAX_SIZE for token_id in ids):
            raise self.refusal(key, f"must be a token id or a list of token ids, not {_shown(value)}")
        return tuple(ids)

    def section(self, key: str) -> "Fields | None":
        """Read an object within this one, if it is there; its keys are named ``key.inner``."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(key, f"must be an object, not {_shown(value)}")
        return Fields(f"{self.source}: {key}", value)

    def refuse_objects(self, reason: str) -> None:
        """Refuse every key that holds an object."""
        for key, value in self._values.items():
            if isinstance(value, dict):
                raise self.refusal(key, reason)

    def _required(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.refusal(key, "is missing")
        return default


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
