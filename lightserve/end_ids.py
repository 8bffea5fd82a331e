"""The ids that end a text. Checkpoints name them in up to four places, and every one of them counts."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gguf.constants import TokenType

from lightserve.fields import Fields
from lightserve.gguf_header import GgufHeader

logger = logging.getLogger(__name__)

# Chat models end a turn with one of these though the file's eos may be another; llama.cpp treats them so as well.
_END_MARKERS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>"}
    | {"<|endoftext|>", "<|end_of_text|>"}
)


def folder_end_ids(folder: Path, config: Fields, vocab_size: int) -> tuple[int, ...]:
    """Collect from config.json, generation_config.json and tokenizer_config.json; ascending.

    Raises:
        ConfigError: A file is damaged or an id is none.
    """
    ids = set(config.token_ids("eos_token_id"))
    generation_path = folder / "generation_config.json"
    if generation_path.is_file():
        ids.update(Fields.from_json(generation_path).token_ids("eos_token_id"))
    tokenizer_path = folder / "tokenizer_config.json"
    if tokenizer_path.is_file():
        tokenizer = Fields.from_json(tokenizer_path)
        ids.update(tokenizer.token_ids("eos_token_id"))
        ids.update(_ids_of_text(folder, tokenizer, _eos_texts(tokenizer)))
    return _within(ids, vocab_size, str(folder))


def gguf_end_ids(header: GgufHeader, vocab_size: int) -> tuple[int, ...]:
    """Collect eos, eot and eom, and every control token that is a known end marker; ascending.

    Raises:
        ConfigError: An id is none.
    """
    fields = header.fields
    ids: set[int] = set()
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        ids.update(fields.token_ids(f"tokenizer.ggml.{key}"))
    tokens = header.metadata.get("tokenizer.ggml.tokens", [])
    kinds = header.metadata.get("tokenizer.ggml.token_type", [])
    if isinstance(tokens, list) and isinstance(kinds, list):
        pairs = enumerate(zip(tokens, kinds, strict=False))
        ids.update(i for i, (text, kind) in pairs if kind == TokenType.CONTROL and text in _END_MARKERS)
    return _within(ids, vocab_size, str(header.path))


def _eos_texts(tokenizer: Fields) -> set[str]:
    value = tokenizer.raw("eos_token")
    entries = value if isinstance(value, list) else [value]
    texts = (entry.get("content") if isinstance(entry, dict) else entry for entry in entries)
    return {text for text in texts if isinstance(text, str)}


def _ids_of_text(folder: Path, tokenizer: Fields, texts: set[str]) -> set[int]:
    decoder = tokenizer.raw("added_tokens_decoder")
    found = _added_ids(decoder, texts) if isinstance(decoder, dict) else {}
    path = folder / "tokenizer.json"
    if texts - found.keys() and path.is_file():
        found |= _vocabulary_ids(Fields.from_json(path), texts - found.keys())
    for text in texts - found.keys():
        logger.warning("%s: eos_token %r is not in the vocabulary and ends nothing", tokenizer.source, text)
    return set(found.values())


def _added_ids(decoder: dict[str, Any], texts: set[str]) -> dict[str, int]:
    contents = {
        entry["content"]: key for key, entry in decoder.items() if isinstance(entry, dict) and "content" in entry
    }
    return {text: int(contents[text]) for text in texts if contents.get(text, "").isdecimal()}


def _vocabulary_ids(tokenizer: Fields, texts: set[str]) -> dict[str, int]:
    model = tokenizer.raw("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    added = tokenizer.raw("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict):
            ids[entry.get("content")] = entry.get("id")
    return {text: ids[text] for text in texts if type(ids.get(text)) is int}


def _within(ids: Iterable[int], vocab_size: int, source: str) -> tuple[int, ...]:
    ids = sorted(ids)
    outside = [token_id for token_id in ids if token_id >= vocab_size]
    if outside:
        logger.warning("%s: end ids %s lie outside the vocabulary of %d and end nothing", source, outside, vocab_size)
    return tuple(token_id for token_id in ids if token_id < vocab_size)
