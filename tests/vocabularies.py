"""Two small vocabularies, one of each family, as the files a model folder holds."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

IM_START, IM_END, MARK = "<|im_start|>", "<|im_end|>", "<mark>"
BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Cuts within characters (你 is E4 BD A0, 好 is E5 A5 BD, 🦙 is F0 9F A6 99) and across them.
_BYTE_WORDS: list[str | bytes] = [
    "hello",
    " world",
    " a",
    "\n\n",
    "  ",
    b"\xe4\xbd",
    b"\xa0\xe5",
    b"\xf0\x9f",
    "、",
    "é",
]
_PIECES = ["▁hello", "▁world", "▁red", "▁green", "▁▁", "你好", "é", "ing", "▁a"]


def byte_level_folder(folder: Path, **config: Any) -> Path:
    """Write a byte-level vocabulary: 256 bytes, some words, two special tokens and one added token that is not."""
    merges = _merges(map(_in_byte_alphabet, _BYTE_WORDS))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=_vocab([*letters, *map("".join, merges)]), merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(IM_START, normalized=False), AddedToken(IM_END, normalized=False)])
    tokenizer.add_tokens([AddedToken(MARK, normalized=False), AddedToken("ñu", normalized=False)])
    return _save(tokenizer, folder, {"bos_token": IM_START, "eos_token": IM_END, "chat_template": CHATML, **config})


def sentencepiece_folder(folder: Path, **config: Any) -> Path:
    """Write a vocabulary like Llama 2's: pieces with ``▁``, bytes for all other characters."""
    merges = _merges(_PIECES)
    pieces = [UNKNOWN, BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(set("".join(_PIECES)))]
    pieces = list(dict.fromkeys([*pieces, *"abcdefghijklmnopqrstuvwxyz.,!", *map("".join, merges)]))
    tokenizer = Tokenizer(
        models.BPE(vocab=_vocab(pieces), merges=merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (UNKNOWN, BOS, EOS)])
    tokenizer.add_tokens([AddedToken(MARK, normalized=False)])
    return _save(tokenizer, folder, {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True, **config})


def edit_json(file: Path, **changes: Any) -> None:
    """Change some keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _save(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _vocab(tokens: Iterable[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Build each word from the left."""
    return list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))


def _in_byte_alphabet(word: str | bytes) -> str:
    raw = word.encode() if isinstance(word, str) else word
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in raw)
