"""What each token id adds to a text, as bytes: a token may hold part of a character, so ids are joined as bytes first.

Two families are known. Byte-level BPE writes a token in an alphabet of 256 printable characters, one per byte.
SentencePiece-like vocabularies write text with ``▁`` for a space, and ``<0xE4>`` for a byte that no other token covers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightserve.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

ToBytes: TypeAlias = Callable[[str], bytes]


@dataclass(frozen=True)
class TokenDecoder:
    """How a vocabulary's tokens become text.

    Attributes:
        token_bytes: Bytes of an ordinary token.
        added_token_bytes: Bytes of an added token, whose content is plain text.
        strips_first_space: A whole text loses one leading space, which encoding had put there.
    """

    token_bytes: ToBytes
    added_token_bytes: ToBytes
    strips_first_space: bool


def make_token_decoder(decoder: Mapping[str, Any] | None) -> TokenDecoder:
    """Read the ``decoder`` of a tokenizer.json.

    Raises:
        ConfigError: It is of neither family.
    """
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenDecoder(_byte_level_bytes, str.encode, strips_first_space=False)
    if not steps or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise ConfigError(f"tokenizer.json: decoder {kinds or 'null'} is of no supported kind")
    replacements = [_replacement(step) for step in steps if step["type"] in ("Replace", "Metaspace")]
    return TokenDecoder(
        token_bytes=_piece_bytes(replacements, byte_fallback="ByteFallback" in kinds),
        added_token_bytes=_piece_bytes(replacements, byte_fallback=False),
        strips_first_space=any(_strips_first_space(step) for step in steps),
    )


def make_bytes_table(decoder: TokenDecoder, vocab: Mapping[str, int], added: Mapping[int, str]) -> list[bytes]:
    """Return the bytes of every id up to the largest; ids without a token have none."""
    table = [b""] * (max([*vocab.values(), *added], default=-1) + 1)
    for token, token_id in vocab.items():
        table[token_id] = decoder.token_bytes(token)
    for token_id, content in added.items():
        table[token_id] = decoder.added_token_bytes(content)
    return table


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    pattern = step["pattern"]
    if "String" not in pattern:
        raise ConfigError(f"tokenizer.json: decoder Replace with pattern {pattern} is not supported")
    return pattern["String"], step["content"]


def _strips_first_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    if step["type"] != "Strip":
        return False
    if (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
        raise ConfigError(f"tokenizer.json: decoder {dict(step)} is not supported: only one leading space is stripped")
    return True


def _piece_bytes(replacements: list[tuple[str, str]], *, byte_fallback: bool) -> ToBytes:
    def piece_bytes(token: str) -> bytes:
        if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return piece_bytes


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    except KeyError:  # not written in the byte alphabet: the text itself, as the tokenizers library has it
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
