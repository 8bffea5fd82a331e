"""The tokenizer inside a .gguf file, written out as tokenizer.json and tokenizer_config.json.

Two models of vocabulary are known: ``gpt2`` (byte-level BPE; the file has the merges) and ``llama`` (SentencePiece BPE;
the file has scores, from which the merges follow).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
from gguf.constants import TokenType

from lightserve.errors import ConfigError
from lightserve.gguf_header import GgufHeader
from lightserve.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_Json: TypeAlias = dict[str, Any]
_Metadata: TypeAlias = Mapping[str, Any]

T = TypeVar("T")

_KEY = "tokenizer.ggml."
_TEMPLATE_KEY = "tokenizer.chat_template"


def export_gguf_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the tokenizer of a .gguf file to ``folder``, which must exist, for ``Tokenizer.load``.

    Raises:
        ConfigError: The file has no tokenizer, or one of a kind that is not supported.
    """
    metadata = GgufHeader.read(gguf).metadata
    try:
        tokenizer, config = _tokenizer_json(metadata), _config_json(metadata)
    except KeyError as error:
        raise ConfigError(f"{gguf}: key {error} is missing") from error
    except ConfigError as error:
        raise ConfigError(f"{gguf}: {error}") from error
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))


def _tokens(metadata: _Metadata) -> list[tuple[str, int]]:
    """Text and type of every id; [PAD…] tokens that only fill up the embedding table are left off the end."""
    tokens = _list(metadata, "tokens", str)
    has_kinds = _KEY + "token_type" in metadata
    kinds = _list(metadata, "token_type", int, len(tokens)) if has_kinds else [TokenType.NORMAL] * len(tokens)
    num_used = max((i for i, kind in enumerate(kinds) if kind != TokenType.UNUSED), default=-1) + 1
    return list(zip(tokens[:num_used], kinds[:num_used], strict=True))


def _list(metadata: _Metadata, key: str, item: type[T], length: int | None = None) -> list[T]:
    values = metadata[_KEY + key]
    if not isinstance(values, list) or not all(isinstance(value, item) for value in values):
        raise ConfigError(f"{_KEY}{key} must be a list of {item.__name__}")
    if length is not None and len(values) != length:
        raise ConfigError(f"{_KEY}{key} has {len(values)} entries for {length} tokens")
    return values


def _tokenizer_json(metadata: _Metadata) -> _Json:
    tokens = _tokens(metadata)
    match metadata[_KEY + "model"]:
        case "gpt2":
            family = _byte_level(metadata, tokens)
        case "llama":
            family = _sentencepiece(metadata, tokens)
        case other:
            raise ConfigError(f"{_KEY}model {other!r} is not supported (gpt2 and llama are)")
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added_tokens(tokens), **family}


def _added_tokens(tokens: list[tuple[str, int]]) -> list[_Json]:
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != TokenType.USER_DEFINED,
        }
        for token_id, (token, kind) in enumerate(tokens)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    ]


def _bpe(tokens: list[tuple[str, int]], merges: list[Any], **settings: Any) -> _Json:
    vocab = {token: token_id for token_id, (token, _) in enumerate(tokens)}
    return {"type": "BPE", "vocab": vocab, "merges": merges, **settings}


def _byte_level(metadata: _Metadata, tokens: list[tuple[str, int]]) -> _Json:
    pre = _pre_tokenizer(metadata)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*map(_split, pre.patterns), byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": _bpe(tokens, _list(metadata, "merges", str), ignore_merges=pre.ignore_merges),
    }


def _pre_tokenizer(metadata: _Metadata) -> PreTokenizer:
    name = metadata.get(_KEY + "pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ConfigError(f"{_KEY}pre {name!r} is not supported ({', '.join(PRE_TOKENIZERS)} are)")
    return PRE_TOKENIZERS[str(name)]


def _split(pattern: str) -> _Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sentencepiece(metadata: _Metadata, tokens: list[tuple[str, int]]) -> _Json:
    unknown = next((token for token, kind in tokens if kind == TokenType.UNKNOWN), None)
    adds_space = bool(metadata.get(_KEY + "add_space_prefix", True))
    prepend = [{"type": "Prepend", "prepend": "▁"}] if adds_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    to_piece = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    to_text = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    scores = _list(metadata, "scores", float, len(_list(metadata, "tokens", str)))
    merges = list(_merges_from_scores(tokens, scores))
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, to_piece]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [to_text, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges_from_scores(tokens: list[tuple[str, int]], scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yield every split of every piece, best score first: SentencePiece joins the neighbours that score best."""
    pieces = {token: i for i, (token, kind) in enumerate(tokens) if kind == TokenType.NORMAL}
    for piece in sorted(pieces, key=lambda piece: -scores[pieces[piece]]):
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        known = [(left, right) for left, right in splits if left in pieces and right in pieces]
        yield from sorted(known, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))


def _config_json(metadata: _Metadata) -> _Json:
    return {
        "bos_token": _named_token(metadata, "bos_token_id"),
        "eos_token": _named_token(metadata, "eos_token_id"),
        "unk_token": _named_token(metadata, "unknown_token_id"),
        "pad_token": _named_token(metadata, "padding_token_id"),
        "add_bos_token": bool(metadata.get(_KEY + "add_bos_token", _adds_bos(metadata))),
        "add_eos_token": bool(metadata.get(_KEY + "add_eos_token", False)),
        "chat_template": _chat_templates(metadata),
    }


def _adds_bos(metadata: _Metadata) -> bool:
    return metadata[_KEY + "model"] == "llama" or _pre_tokenizer(metadata).adds_bos


def _named_token(metadata: _Metadata, key: str) -> str | None:
    token_id = metadata.get(_KEY + key)
    tokens = _list(metadata, "tokens", str)
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        return None  # a file without the key has no such token: no usual id is put in its place
    return str(tokens[token_id])


def _chat_templates(metadata: _Metadata) -> list[_Json]:
    named = {"default": metadata.get(_TEMPLATE_KEY)} | {
        key.removeprefix(_TEMPLATE_KEY + "."): source
        for key, source in metadata.items()
        if key.startswith(_TEMPLATE_KEY + ".")
    }
    return [{"name": name, "template": source} for name, source in named.items() if source is not None]
