"""Keeps a client's text from forging turns: special tokens written inside a message stay ordinary text.

Only the template's own special tokens become ids. To know them apart after rendering, the first character of every
special token within the messages is replaced by half of a surrogate pair, which no text can hold, and put back once the
template's special tokens have been cut out. Messages without any (nearly all) take the plain way.
"""

import re
from collections.abc import Iterator
from typing import Any, TypeAlias

from lightserve.errors import RequestError
from lightserve.tokenizer import Tokenizer, pattern_of_longest

Mask: TypeAlias = dict[int, str]  # code of a stand-in -> the character it stands for

_FIRST_STAND_IN = 0xD800


class MarkGuard:
    """Tells the template's special tokens from a client's.

    Args:
        tokenizer: Names the special tokens and encodes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        marks = [mark for mark in tokenizer.special_id_of if mark]
        pattern = pattern_of_longest(marks)
        self._mark = re.compile(f"({pattern})")
        self._start_of_mark = re.compile(f"(?={pattern})")
        first_chars = sorted({mark[0] for mark in marks})
        self._stand_ins = {char: chr(_FIRST_STAND_IN + i) for i, char in enumerate(first_chars)}
        self._mask: Mask = {ord(stand_in): char for char, stand_in in self._stand_ins.items()}

    def mask(self, value: Any) -> tuple[Any, Mask]:
        """Return ``value`` (strings, lists, mappings) with no special token in it, and how to undo that.

        Raises:
            RequestError: A string is not valid Unicode.
        """
        text = "".join(_strings(value))
        if self._start_of_mark.search(text) is None:
            return value, {}
        if any(map(text.__contains__, self._stand_ins.values())):
            raise RequestError("The messages are not valid Unicode: they hold half of a surrogate pair.")
        return self._masked(value), self._mask

    def unmask(self, rendered: str, mask: Mask) -> str:
        """Return the text as the client wrote it."""
        return rendered.translate(mask) if mask else rendered

    def encode(self, rendered: str, mask: Mask) -> list[int]:
        """Encode a text rendered from masked messages."""
        if not mask:
            return self._tokenizer.encode(rendered, add_special_tokens=False)
        id_of = self._tokenizer.special_id_of
        pieces = self._mark.split(rendered)  # text, mark, text, …, text
        parts = [id_of[piece] if i % 2 else piece.translate(mask) for i, piece in enumerate(pieces)]
        return self._tokenizer.encode_parts(parts)

    def _masked(self, value: Any) -> Any:
        match value:
            case str():
                return self._masked_text(value)
            case dict():
                return {self._masked(key): self._masked(item) for key, item in value.items()}
            case list() if _are_text_parts(value):
                return self._masked_parts(value)
            case list():
                return [self._masked(item) for item in value]
            case _:
                return value

    def _masked_text(self, text: str) -> str:
        chars = list(text)
        for match in self._start_of_mark.finditer(text):
            chars[match.start()] = self._stand_ins[chars[match.start()]]
        return "".join(chars)

    def _masked_parts(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Mask text parts as one text: a template prints them one after the other, and so a mark may span them."""
        masked = self._masked_text("".join(part["text"] for part in parts))
        result, end = [], 0
        for part in parts:
            start, end = end, end + len(part["text"])
            result.append({**part, "text": masked[start:end]})
        return result


def _are_text_parts(value: list[Any]) -> bool:
    return all(
        isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str) for part in value
    )


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for key, item in value.items():
                yield from _strings(key)
                yield from _strings(item)
        case list():
            for item in value:
                yield from _strings(item)
        case _:
            pass
