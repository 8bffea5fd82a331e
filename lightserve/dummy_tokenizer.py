"""A tokenizer for models that exist as a configuration only, so that benchmarks meet text of a realistic length.

Every id of the vocabulary has text, so nothing else has to know of dummies: the first 256 ids that are not special are
the bytes, all others are invented words of a space and two or three syllables. Text encodes to one id per byte.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from tokenizers.pre_tokenizers import ByteLevel

from lightserve.errors import ConfigError
from lightserve.model_config import ModelConfig

_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwxyz" for vowel in "aeiou"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_dummy_tokenizer(config: ModelConfig, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json to ``folder``, which must exist.

    Raises:
        ConfigError: The vocabulary has no room for the 256 bytes.
    """
    specials = {token_id: f"<|end_{token_id}|>" for token_id in config.eos_token_ids}
    if config.bos_token_id is not None:
        specials.setdefault(config.bos_token_id, "<|begin|>")
    if config.vocab_size < 256 + len(specials):
        raise ConfigError(
            f"{config.weights_path}: has no tokenizer, and a vocabulary of {config.vocab_size} is too small for an "
            "invented one; name one with --tokenizer"
        )
    plain = _plain_tokens()
    vocabulary = {specials.get(token_id) or next(plain): token_id for token_id in range(config.vocab_size)}
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(_tokenizer_json(vocabulary, specials)))
    named = {"chat_template": _CHAT_TEMPLATE}
    if config.eos_token_ids:
        named["eos_token"] = specials[config.eos_token_ids[0]]
    if config.bos_token_id is not None:
        named["bos_token"] = specials[config.bos_token_id]
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(named))


def _plain_tokens() -> Iterator[str]:
    yield from sorted(ByteLevel.alphabet())
    number = 0
    while True:
        yield "Ġ" + _word(number)  # Ġ stands for the space in the byte-level alphabet
        number += 1


def _word(number: int) -> str:
    # Offset so that every word has at least two syllables and each number its own word.
    number += len(_SYLLABLES)
    word = ""
    while number:
        number, digit = divmod(number, len(_SYLLABLES))
        word = _SYLLABLES[digit] + word
    return word


def _tokenizer_json(vocabulary: dict[str, int], specials: dict[int, str]) -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": token_id, "content": text, **flags} for token_id, text in sorted(specials.items())],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
