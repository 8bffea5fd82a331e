"""Text to token ids and back, from a folder's tokenizer.json and tokenizer_config.json."""

import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from lightserve.errors import ConfigError, RequestError
from lightserve.token_bytes import make_bytes_table, make_token_decoder

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class _TokenizerFile(msgspec.Struct):
    """What we read of a tokenizer.json ourselves; the rest is the library's."""

    decoder: dict[str, Any] | None = None


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """What we read of a tokenizer_config.json, or of an older special_tokens_map.json."""

    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    unk_token: str | dict[str, Any] | None = None
    pad_token: str | dict[str, Any] | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class Tokenizer:
    """Text to ids and back. Never changed once made, so threads may share it.

    Attributes:
        special_tokens: ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token`` as text, those that are named.
        special_ids: Ids of tokens that are not text but marks, such as the end of a turn.
        chat_template: Jinja source of the usual chat template, if the model has one.
        bytes_table: [vocab_size], the bytes that each id adds to a text: maybe part of a character, maybe none.
        strips_first_space: A whole text loses one leading space, which encoding had put there; a continuation keeps it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, decoder: dict[str, Any] | None, config: _TokenizerConfig) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        token_decoder = make_token_decoder(decoder)
        self.strips_first_space = token_decoder.strips_first_space
        self.bytes_table: Sequence[bytes] = make_bytes_table(
            token_decoder,
            backend.get_vocab(with_added_tokens=True),
            {token_id: token.content for token_id, token in added.items()},
        )
        self._specials = {token_id: token for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(self._specials)
        self.special_tokens = _named_tokens(config)
        self.chat_template = _chat_template(config)
        self._prefix, self._suffix = self._added_around(config)
        self._lock = threading.Lock()
        self._plain: _PlainEncoder | None = None

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Load a tokenizer.json, or the folder it lies in, with the files beside it.

        Raises:
            ConfigError: A file is missing or damaged, or the vocabulary is of no supported kind.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            raw = file.read_bytes()
            backend = tokenizers.Tokenizer.from_buffer(raw)
            decoder = msgspec.json.decode(raw, type=_TokenizerFile).decoder
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: {error}") from error
        return cls(backend, decoder, _read_config(file.parent))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has text."""
        return len(self.bytes_table)

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text, if one is named."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text, if one is named."""
        return self.special_tokens.get("eos_token")

    @cached_property
    def special_id_of(self) -> Mapping[str, int]:
        """Ids of the special tokens by their text."""
        return {token.content: token_id for token_id, token in self._specials.items()}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text; special tokens written in it become their ids.

        Args:
            text: Of any length; nothing is cut.
            add_special_tokens: Put around it what the model expects around a bare text, such as a first BOS; a text
                that begins with its BOS gets no second one.

        Raises:
            RequestError: The text holds half of a surrogate pair and is not Unicode text.
        """
        ids = _encode(self._backend, text)
        if not add_special_tokens:
            return ids
        prefix = [] if ids[: len(self._prefix)] == self._prefix else self._prefix
        return [*prefix, *ids, *self._suffix]

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Encode a text whose special tokens are known: only the ids among ``parts`` become special tokens.

        Equal to ``encode`` of the joined text (without added tokens) except that a special token written out within a
        string stays ordinary text.

        Raises:
            RequestError: As ``encode``.
        """
        return self._plain_encoder().encode(parts)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode a whole text; bytes that are not UTF-8 become U+FFFD.

        Raises:
            RequestError: An id is not in [0, vocab_size).
        """
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise RequestError(f"Token ids must be in [0, {self.vocab_size}).", param="tokens")
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.bytes_table[i] for i in token_ids if i not in skipped).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def _plain_encoder(self) -> "_PlainEncoder":
        with self._lock:
            if self._plain is None:
                self._plain = _PlainEncoder(self._backend, self._specials)
            return self._plain

    def _added_around(self, config: _TokenizerConfig) -> tuple[list[int], list[int]]:
        """Find what goes around a bare text: the post-processor's ids, but for ``add_bos_token``, ``add_eos_token``."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        ids = self._backend.encode("a", add_special_tokens=True).ids
        start = next(i for i in range(len(ids) + 1) if ids[i : i + len(bare)] == bare)
        prefix, suffix = ids[:start], ids[start + len(bare) :]
        return (
            _with_or_without(prefix, self._id_of(self.bos_token), config.add_bos_token),
            _with_or_without(suffix, self._id_of(self.eos_token), config.add_eos_token),
        )

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


class _PlainEncoder:
    """Encodes texts in which special tokens are known only by stand-ins that no client can guess.

    A copy of the vocabulary takes the special tokens for ordinary text and has the stand-ins added, so that one pass
    of the library splits, strips and prefixes around them exactly as around the special tokens themselves.
    """

    def __init__(self, backend: tokenizers.Tokenizer, specials: Mapping[int, tokenizers.AddedToken]) -> None:
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.encode_special_tokens = True
        self._stand_ins = {token_id: f"\U0010fffd{secrets.token_hex(16)}\U0010fffd" for token_id in specials}
        self._backend.add_tokens([_stand_in(token, self._stand_ins[i]) for i, token in specials.items()])
        self._id_of_added = {self._backend.token_to_id(text): i for i, text in self._stand_ins.items()}

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        text = "".join(part if isinstance(part, str) else self._stand_ins[part] for part in parts)
        return [self._id_of_added.get(token_id, token_id) for token_id in _encode(self._backend, text)]


def has_chat_template(folder: Path) -> bool:
    """Tell whether a tokenizer's folder has a chat template, without loading the tokenizer.

    Raises:
        ConfigError: A file is damaged.
    """
    return _chat_template(_read_config(folder)) is not None


def pattern_of_longest(words: Sequence[str]) -> str:
    """Return a pattern for the longest of some words, branching letter by letter; it finds nothing if there are none.

    With 256 reserved tokens it searches a megabyte in 0.07 s at worst; one alternative per token takes 2 s.
    """
    return _pattern_of_endings(words) if words else "(?!)"


def _pattern_of_endings(endings: Sequence[str]) -> str:
    branches = [
        re.escape(first) + _pattern_of_endings([ending[1:] for ending in group])
        for first, group in groupby(sorted(filter(None, endings)), key=lambda ending: ending[0])
    ]
    if "" in endings:
        return f"(?:{'|'.join(branches)})?" if branches else ""
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _stand_in(token: tokenizers.AddedToken, content: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=False,
    )


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        # The batch call lets go of the interpreter lock; `encode` holds it, a second for a text of 700 kB.
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except TypeError as error:  # the library's word for a lone surrogate
        raise RequestError("The text is not valid Unicode: it holds half of a surrogate pair.") from error


def _with_or_without(ids: list[int], token_id: int | None, wanted: bool | None) -> list[int]:
    """Return ``ids`` with or without ``token_id`` as ``wanted``; unchanged when nobody says."""
    if wanted is None or token_id is None or wanted == (token_id in ids):
        return ids
    return [*ids, token_id] if wanted else [other for other in ids if other != token_id]


def _read_config(folder: Path) -> _TokenizerConfig:
    config = msgspec.structs.replace(
        _read_json(folder / "special_tokens_map.json"), **_set_fields(_read_json(folder / "tokenizer_config.json"))
    )
    template = folder / "chat_template.jinja"  # newer folders have it in a file of its own, which then counts
    if not template.is_file():
        return config
    return msgspec.structs.replace(config, chat_template=template.read_text(encoding="utf-8"))


def _read_json(file: Path) -> _TokenizerConfig:
    if not file.is_file():
        return _TokenizerConfig()
    try:
        return msgspec.json.decode(file.read_bytes(), type=_TokenizerConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file}: {error}") from error


def _set_fields(config: _TokenizerConfig) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(config).items() if value is not None}


def _named_tokens(config: _TokenizerConfig) -> dict[str, str]:
    tokens = {name: getattr(config, name) for name in _NAMED_TOKENS}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in tokens.items()
        if token is not None
    }


def _chat_template(config: _TokenizerConfig) -> str | None:
    if not isinstance(config.chat_template, list):
        return config.chat_template
    named = {entry.name: entry.template for entry in config.chat_template}
    return named.get("default", next(iter(named.values()), None))
