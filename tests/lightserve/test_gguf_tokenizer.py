"""Small .gguf files with one tokenizer each; the tensors do not matter here."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from lightserve.errors import ConfigError
from lightserve.gguf_pre_tokenizers import PRE_TOKENIZERS
from lightserve.gguf_tokenizer import export_gguf_tokenizer
from lightserve.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

WORDS = ["he", "hel", "hello", "Ġ1", "12", "123", "ĠĠ", "Ġw", "ĠĠĠ", "'T"]
PIECES = ["▁", "e", "r", "d", "n", "g", "re", "▁re", "▁red", "en", "re", "ree", "green", "▁g", "gr", "ed", "een", "▁▁"]


def write_gguf(path: Path, keys: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
            case _:
                raise TypeError(f"{key} is of a type that is not written here")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_keys(**changes: Any) -> dict[str, Any]:
    """Return the keys of a byte-level vocabulary; None drops a key."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ordinary = [*letters, *WORDS]
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ordinary, "<tool>", "[PAD269]", "[PAD270]"],
        "token_type": [CONTROL] * 3 + [NORMAL] * len(ordinary) + [USER_DEFINED, UNUSED, UNUSED],
        "merges": ["h e", "he l", "hel l", "Ġ 1", "1 2", "12 3", "Ġ Ġ", "Ġ w", "ĠĠ Ġ", "' T"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    keys["merges"] = [merge for merge in keys["merges"] if merge.replace(" ", "") in keys["tokens"]]
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def sentencepiece_keys(**changes: Any) -> dict[str, Any]:
    pieces = list(dict.fromkeys(PIECES))
    num_bytes = 256
    keys = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(num_bytes)), *pieces, "<tool>"],
        "scores": [0.0] * (3 + num_bytes) + [-float(i) for i in range(len(pieces))] + [0.0],
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * num_bytes + [NORMAL] * len(pieces) + [USER_DEFINED],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def export(folder: Path, keys: dict[str, Any]) -> Tokenizer:
    export_gguf_tokenizer(write_gguf(folder / "model.gguf", keys), folder)
    return Tokenizer.load(folder)


def pieces_of(tokenizer: Tokenizer, text: str) -> list[bytes]:
    return [tokenizer.bytes_table[i] for i in tokenizer.encode(text, add_special_tokens=False)]


@given(text=st.text())
def test_any_byte_level_text_survives(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokenizer = BYTE_LEVEL.get(tmp_path_factory)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_merges_apply_in_their_order(tmp_path: Path) -> None:
    assert pieces_of(export(tmp_path, byte_level_keys()), "hello") == [b"hel", b"l", b"o"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", [b"123", b"4", b" ", b" 1"]),
        ("smollm", [b"1", b"2", b"3", b"4", b"  ", b"1"]),
        ("qwen2", [b"1", b"2", b"3", b"4", b" ", b" ", b"1"]),
        ("llama-bpe", [b"123", b"4", b" ", b" ", b"1"]),
        ("tekken", [b"1", b"2", b"3", b"4", b" ", b" ", b"1"]),
    ],
)
def test_each_kind_cuts_digits_and_spaces_its_own_way(tmp_path: Path, pre: str, pieces: list[bytes]) -> None:
    assert pieces_of(export(tmp_path, byte_level_keys(pre=pre)), "1234  1") == pieces


@pytest.mark.parametrize("text", ["don't  1234\r\n x", "  12 3\t\tA'LL ½²", "你好\n\n\n1"])
def test_smollm_cuts_like_digits_then_byte_level(text: str) -> None:
    ours = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS["smollm"].patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    original = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert ours.pre_tokenize_str(text) == original.pre_tokenize_str(text)


def test_a_word_that_is_a_token_is_not_merged_again_where_the_kind_says_so(tmp_path: Path) -> None:
    assert pieces_of(export(tmp_path, byte_level_keys(pre="llama-bpe")), "hello") == [b"hello"]


def test_qwen2_brings_text_to_normal_form(tmp_path: Path) -> None:
    tokenizer = export(tmp_path, byte_level_keys(pre="qwen2"))
    assert (
        tokenizer.decode(tokenizer.encode("e\u0301", add_special_tokens=False), skip_special_tokens=False) == "\u00e9"
    )


def test_a_file_without_a_kind_is_cut_like_gpt2(tmp_path: Path) -> None:
    assert pieces_of(export(tmp_path, byte_level_keys(pre=None)), "1234  1") == [b"123", b"4", b" ", b" 1"]


def test_control_tokens_are_special_and_the_users_own_are_not(tmp_path: Path) -> None:
    tokenizer = export(tmp_path, byte_level_keys())
    assert tokenizer.special_id_of == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    ids = tokenizer.encode("<|im_start|>1<tool>2<|im_end|>", add_special_tokens=False)
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 5)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1<tool>2"


def test_filling_of_the_embedding_table_has_no_text(tmp_path: Path) -> None:
    keys = byte_level_keys()
    tokenizer = export(tmp_path, keys)
    assert tokenizer.vocab_size == len(keys["tokenizer.ggml.tokens"]) - 2


def join_best_neighbours(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's own rule, taken literally."""
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [(scores.get(a + b, -1e9), -i) for i, (a, b) in enumerate(pairwise(pieces))]
        score, minus_i = max(joined, default=(-1e9, 0))
        if score == -1e9:
            return pieces
        pieces[-minus_i : -minus_i + 2] = [pieces[-minus_i] + pieces[-minus_i + 1]]


@given(text=st.text(alphabet="redgn "))
def test_neighbours_with_the_best_score_are_joined_first(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokenizer = SENTENCEPIECE.get(tmp_path_factory)
    keys = sentencepiece_keys()
    scores = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"], strict=True))
    expected = [piece.replace("▁", " ").encode() for piece in join_best_neighbours(text, scores)]
    assert pieces_of(tokenizer, text) == expected


@given(text=st.text())
def test_any_sentencepiece_text_survives(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokenizer = SENTENCEPIECE.get(tmp_path_factory)
    text = text.replace("▁", "_")
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_a_character_without_a_piece_is_written_in_bytes(tmp_path: Path) -> None:
    assert pieces_of(export(tmp_path, sentencepiece_keys()), "é") == [b" ", b"\xc3", b"\xa9"]


@pytest.mark.parametrize(("add_space_prefix", "pieces"), [(None, [b" red"]), (True, [b" red"]), (False, [b"re", b"d"])])
def test_a_first_space_is_added_as_the_file_says(
    tmp_path: Path, add_space_prefix: bool | None, pieces: list[bytes]
) -> None:
    tokenizer = export(tmp_path, sentencepiece_keys(add_space_prefix=add_space_prefix))
    assert pieces_of(tokenizer, "red") == pieces
    assert tokenizer.decode(tokenizer.encode("red", add_special_tokens=False), skip_special_tokens=True) == "red"


@pytest.mark.parametrize(
    ("keys", "num_bos"),
    [
        (sentencepiece_keys(bos_token_id=None), 0),
        (sentencepiece_keys(add_bos_token=False), 0),
        (sentencepiece_keys(add_bos_token=True), 1),
        (sentencepiece_keys(), 1),
        (byte_level_keys(bos_token_id=None, add_bos_token=True), 0),
        (byte_level_keys(add_bos_token=False), 0),
        (byte_level_keys(add_bos_token=True), 1),
        (byte_level_keys(), 0),
        (byte_level_keys(pre="llama-bpe"), 1),
        (byte_level_keys(pre="llama-bpe", add_bos_token=False), 0),
    ],
)
def test_a_bare_text_begins_with_bos_only_where_the_file_has_one(
    tmp_path: Path, keys: dict[str, Any], num_bos: int
) -> None:
    tokenizer = export(tmp_path, keys)
    assert tokenizer.encode("red", add_special_tokens=True)[:num_bos] == [1] * num_bos
    assert tokenizer.encode("red", add_special_tokens=True).count(1) == num_bos


def test_named_tokens_are_handed_on(tmp_path: Path) -> None:
    tokenizer = export(tmp_path, byte_level_keys(padding_token_id=0, unknown_token_id=10**6))
    assert tokenizer.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }


@pytest.mark.parametrize(
    ("templates", "expected"),
    [
        ({}, None),
        ({"tokenizer.chat_template": "usual"}, "usual"),
        ({"tokenizer.chat_template": "usual", "tokenizer.chat_template.tool_use": "tools"}, "usual"),
        ({"tokenizer.chat_templates": ["default"], "tokenizer.chat_template.default": "named"}, "named"),
    ],
)
def test_chat_templates_are_handed_on(tmp_path: Path, templates: dict[str, Any], expected: str | None) -> None:
    assert export(tmp_path, byte_level_keys() | templates).chat_template == expected


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (byte_level_keys(model="bert"), "tokenizer.ggml.model 'bert'"),
        (byte_level_keys(pre="klingon"), "tokenizer.ggml.pre 'klingon'"),
        (byte_level_keys(model=None), "tokenizer.ggml.model"),
        (sentencepiece_keys(scores=None), "tokenizer.ggml.scores"),
        (sentencepiece_keys(tokens="red"), "tokenizer.ggml.tokens"),
        (sentencepiece_keys(scores=[0.5]), "tokenizer.ggml.scores"),
        (sentencepiece_keys(token_type=[1]), "tokenizer.ggml.token_type"),
    ],
)
def test_a_file_without_a_usable_tokenizer_is_refused(tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as error:
        export(tmp_path, keys)
    assert "model.gguf" in str(error.value)


class _Shared:
    """Exports once, so that hypothesis can try many texts."""

    def __init__(self, keys: dict[str, Any]) -> None:
        self._keys = keys
        self._tokenizer: Tokenizer | None = None

    def get(self, factory: pytest.TempPathFactory) -> Tokenizer:
        self._tokenizer = self._tokenizer or export(factory.mktemp("gguf"), self._keys)
        return self._tokenizer


BYTE_LEVEL = _Shared(byte_level_keys())
SENTENCEPIECE = _Shared(sentencepiece_keys())
