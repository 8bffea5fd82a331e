"""How each kind of byte-level vocabulary cuts a text into words before merging: ``tokenizer.ggml.pre`` of a .gguf file.

The expressions are those of the vocabularies' own tokenizer.json files; a .gguf file holds only the kind's name.
"""

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One kind.

    Attributes:
        patterns: Applied in turn, each cutting what the one before left whole; a match is a word.
        nfc: Texts are brought to Unicode normal form C first.
        ignore_merges: A word that is a token is never split further.
        adds_bos: A bare text begins with BOS when the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_WORDS = PreTokenizer((_GPT2,))
_DIGIT_BY_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA_3 = PreTokenizer((_GPT4 % 3,), ignore_merges=True, adds_bos=True)
_QWEN_2 = PreTokenizer((_GPT4.replace("{1,%d}", ""),), nfc=True)

PRE_TOKENIZERS = {
    "default": _WORDS,
    "gpt-2": _WORDS,
    "olmo": _WORDS,
    "smollm": _DIGIT_BY_DIGIT,
    "starcoder": _DIGIT_BY_DIGIT,
    "refact": _DIGIT_BY_DIGIT,
    "command-r": _DIGIT_BY_DIGIT,
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "falcon3": _LLAMA_3,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "stablelm2": _QWEN_2,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
}
