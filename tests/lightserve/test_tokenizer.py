import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lightserve.errors import ConfigError, RequestError
from lightserve.tokenizer import Tokenizer, has_chat_template, pattern_of_longest
from tests.tiny_model import make_model_folder
from tests.vocabularies import (
    BOS,
    IM_END,
    IM_START,
    MARK,
    byte_level_folder,
    edit_json,
    sentencepiece_folder,
)

WORDS = st.lists(st.text("ab|<.", min_size=1, max_size=4), min_size=1, max_size=6)
TEXTS = ["", "hello world", "你好，世界 🦙 👨‍👩‍👧", "a\x00b", "  two\n\n\tthree  ", "ñandú 9", "ﬁ İ ½ 1234"]


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    loaded: Tokenizer = request.getfixturevalue(request.param)
    return loaded


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@given(text=st.text())
def test_any_byte_level_text_survives(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@given(text=st.text())
def test_any_sentencepiece_text_survives(sentencepiece: Tokenizer, text: str) -> None:
    text = text.replace("▁", "_")  # that vocabulary's own sign for a space
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert sentencepiece.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("make_folder", [byte_level_folder, sentencepiece_folder])
def test_decoding_equals_the_librarys(
    tmp_path: Path, make_folder: Callable[[Path], Path], skip_special_tokens: bool
) -> None:
    file = make_folder(tmp_path) / "tokenizer.json"
    reference, ours = tokenizers.Tokenizer.from_file(str(file)), Tokenizer.load(tmp_path)
    for text in ["hello world", BOS + " 你好 red", IM_START + "user\nhi" + IM_END, f"{MARK}up{MARK}9", "   a  b "]:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids, skip_special_tokens=skip_special_tokens) == reference.decode(ids, skip_special_tokens)


def test_nothing_stands_between_added_tokens_and_text(tokenizer: Tokenizer) -> None:
    text = f"{MARK}{MARK}9{MARK}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for skip_special_tokens in (True, False):
        decoded = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        # SentencePiece vocabularies put a space before each stretch of text; that is in the ids
        assert decoded.replace(" ", "") == text


def test_an_added_token_with_a_letter_of_the_byte_alphabet_decodes_to_itself(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ñu", add_special_tokens=False)
    assert len(ids) == 1
    assert byte_level.decode(ids, skip_special_tokens=False) == "ñu"


def test_special_tokens_are_left_out_on_demand(byte_level: Tokenizer) -> None:
    ids = byte_level.encode(f"hi{IM_END}", add_special_tokens=False)
    assert byte_level.decode(ids, skip_special_tokens=True) == "hi"
    assert byte_level.decode(ids, skip_special_tokens=False) == f"hi{IM_END}"
    assert byte_level.special_ids == {byte_level.special_id_of[IM_START], byte_level.special_id_of[IM_END]}


def test_bytes_of_ids_are_exact_within_characters(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("你好", add_special_tokens=False)
    pieces = [byte_level.bytes_table[token_id] for token_id in ids]
    assert b"".join(pieces) == "你好".encode()
    assert b"\xe4\xbd" in pieces


def test_byte_tokens_of_a_sentencepiece_vocabulary_are_bytes(sentencepiece: Tokenizer) -> None:
    assert [sentencepiece.bytes_table[3 + byte] for byte in (0x00, 0x41, 0xFF)] == [b"\x00", b"A", b"\xff"]


def test_only_one_leading_space_of_a_whole_text_is_stripped(sentencepiece: Tokenizer) -> None:
    for text in ("red", " red", "  red"):
        assert (
            sentencepiece.decode(sentencepiece.encode(text, add_special_tokens=False), skip_special_tokens=True) == text
        )


def test_bytes_that_are_not_utf8_become_replacement_characters(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("你", add_special_tokens=False)
    assert byte_level.decode([*ids[:-1], *ids], skip_special_tokens=False) == "\ufffd你"


@pytest.mark.parametrize("token_ids", [[-1], [10**6], [2**40]])
def test_ids_without_text_are_the_clients_mistake(byte_level: Tokenizer, token_ids: list[int]) -> None:
    with pytest.raises(RequestError, match="Token ids must be in"):
        byte_level.decode(token_ids, skip_special_tokens=False)


def test_vocab_size_counts_the_ids_that_have_text(byte_level: Tokenizer) -> None:
    assert byte_level.vocab_size == len(byte_level.bytes_table)
    assert byte_level.bytes_table[byte_level.vocab_size - 1] == "ñu".encode()


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_half_a_surrogate_pair_is_the_clients_mistake(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode(text, add_special_tokens=True)


def test_truncation_and_padding_stored_in_the_file_do_not_apply(tmp_path: Path) -> None:
    edit_json(
        byte_level_folder(tmp_path) / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 100},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        },
    )
    assert len(Tokenizer.load(tmp_path).encode("xyz", add_special_tokens=True)) == 3


@pytest.mark.parametrize(("add_bos_token", "num_bos"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("in_post_processor", [True, False])
def test_the_config_decides_about_bos(
    tmp_path: Path, add_bos_token: bool, num_bos: int, in_post_processor: bool
) -> None:
    folder = sentencepiece_folder(tmp_path, add_bos_token=add_bos_token)
    edit_json(folder / "tokenizer.json", post_processor=_bos_template() if in_post_processor else None)
    tokenizer = Tokenizer.load(folder)
    bos_id = tokenizer.special_id_of[BOS]
    assert tokenizer.encode("red", add_special_tokens=True).count(bos_id) == num_bos
    assert tokenizer.encode("red", add_special_tokens=False).count(bos_id) == 0
    assert tokenizer.encode("", add_special_tokens=True) == [bos_id] * num_bos


def test_the_post_processor_decides_when_the_config_does_not(tmp_path: Path) -> None:
    folder = sentencepiece_folder(tmp_path, add_bos_token=None)
    assert Tokenizer.load(folder).encode("", add_special_tokens=True) == []
    edit_json(folder / "tokenizer.json", post_processor=_bos_template())
    assert Tokenizer.load(folder).encode("", add_special_tokens=True) == [1]


def test_eos_is_added_where_the_config_asks_for_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentencepiece_folder(tmp_path, add_eos_token=True))
    assert tokenizer.encode("", add_special_tokens=True) == [1, 2]


def test_a_text_that_begins_with_bos_gets_no_second_one(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode(BOS + "red", add_special_tokens=True).count(1) == 1


def _bos_template() -> dict[str, Any]:
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {BOS: {"id": BOS, "ids": [1], "tokens": [BOS]}},
    }


def test_named_tokens_may_be_objects(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level_folder(tmp_path, eos_token={"content": IM_END, "lstrip": False}))
    assert (tokenizer.bos_token, tokenizer.eos_token) == (IM_START, IM_END)


def test_an_older_special_tokens_map_fills_what_the_config_leaves_open(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": MARK, "eos_token": IM_END}))
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (IM_START, IM_END)


@pytest.mark.parametrize(
    ("in_config", "in_file", "expected"),
    [
        (None, None, None),
        ("from config", None, "from config"),
        ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], None, "d"),
        ([{"name": "rag", "template": "r"}], None, "r"),
        ([], None, None),
        ("from config", "from file", "from file"),
        (None, "from file", "from file"),
    ],
)
def test_chat_templates_are_found_in_all_their_places(
    tmp_path: Path, in_config: Any, in_file: str | None, expected: str | None
) -> None:
    folder = byte_level_folder(tmp_path, chat_template=in_config)
    if in_file is not None:
        (folder / "chat_template.jinja").write_text(in_file)
    assert Tokenizer.load(folder).chat_template == expected


def test_a_tokenizer_is_loaded_from_its_file_too(tmp_path: Path) -> None:
    assert Tokenizer.load(byte_level_folder(tmp_path) / "tokenizer.json").eos_token == IM_END


def test_a_config_file_is_not_needed(tmp_path: Path) -> None:
    (byte_level_folder(tmp_path) / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).bos_token is None


@pytest.mark.parametrize(
    "decoder",
    [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "BPEDecoder", "suffix": "</w>"}],
)
def test_a_vocabulary_of_no_known_family_is_refused_at_start(tmp_path: Path, decoder: dict[str, Any] | None) -> None:
    edit_json(byte_level_folder(tmp_path) / "tokenizer.json", decoder=decoder)
    with pytest.raises(ConfigError, match="decoder"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "step",
    [
        {"type": "Replace", "pattern": {"Regex": "_+"}, "content": " "},
        {"type": "Strip", "content": "x", "start": 1, "stop": 0},
    ],
)
def test_a_decoder_step_of_no_known_form_is_refused_at_start(tmp_path: Path, step: dict[str, Any]) -> None:
    edit_json(sentencepiece_folder(tmp_path) / "tokenizer.json", decoder={"type": "Sequence", "decoders": [step]})
    with pytest.raises(ConfigError, match="not supported"):
        Tokenizer.load(tmp_path)


def test_a_metaspace_decoder_is_of_the_sentencepiece_family(tmp_path: Path) -> None:
    folder = sentencepiece_folder(tmp_path)
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
    edit_json(folder / "tokenizer.json", decoder=metaspace, normalizer=None, pre_tokenizer=metaspace)
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("red green", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "red green"
    assert tokenizer.bytes_table[ids[0]] == b" red"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_the_operators_mistake(tmp_path: Path, name: str, damage: bytes) -> None:
    (byte_level_folder(tmp_path) / name).write_bytes(damage)
    with pytest.raises(ConfigError, match=name):
        Tokenizer.load(tmp_path)


def test_a_missing_file_is_the_operators_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/tokenizer.json: .*No such file"):
        Tokenizer.load(tmp_path)


def test_special_tokens_written_in_plain_parts_stay_text(tokenizer: Tokenizer) -> None:
    mark, mark_id = next(iter(tokenizer.special_id_of.items()))
    ids = tokenizer.encode_parts(["red ", mark_id, f"green {mark}{mark}", mark_id])
    assert [token_id for token_id in ids if token_id in tokenizer.special_ids] == [mark_id, mark_id]
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith(f"green {mark}{mark}")


@given(
    texts=st.lists(st.sampled_from(["", " ", "red", " green", "你好 ", "a\n\n", MARK]), min_size=1),
    which=st.integers(0, 1),
)
def test_parts_without_marks_inside_encode_like_the_joined_text(
    sentencepiece: Tokenizer, byte_level: Tokenizer, texts: list[str], which: int
) -> None:
    tokenizer = (sentencepiece, byte_level)[which]
    mark, mark_id = next(iter(tokenizer.special_id_of.items()))
    parts = [part for text in texts for part in (text, mark_id)]
    assert tokenizer.encode_parts(parts) == tokenizer.encode(
        "".join(text + mark for text in texts), add_special_tokens=False
    )


@given(words=WORDS, text=st.text("ab|<.", max_size=20))
def test_the_pattern_of_the_longest_word_finds_what_one_alternative_per_word_finds(words: list[str], text: str) -> None:
    longest_first = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    assert re.findall(pattern_of_longest(words), text) == re.findall(longest_first, text)


@given(text=st.text("ab", max_size=5))
def test_the_pattern_of_no_words_finds_nothing(text: str) -> None:
    assert re.search(pattern_of_longest([]), text) is None


def test_a_chat_template_is_found_in_either_place(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    assert has_chat_template(folder)

    (folder / "tokenizer_config.json").write_text("{}")
    assert not has_chat_template(folder)

    (folder / "chat_template.jinja").write_text("x")
    assert has_chat_template(folder)


def test_many_threads_get_the_same_results_as_one(tokenizer: Tokenizer) -> None:
    def work(seed: int) -> bool:
        text = TEXTS[seed % len(TEXTS)] * (seed % 7)
        add = seed % 2 == 0
        ids = tokenizer.encode(text, add_special_tokens=add)
        parts = tokenizer.encode_parts([text])
        return (ids, parts, tokenizer.decode(ids, skip_special_tokens=add)) == expected[seed % 42]

    expected: dict[int, tuple[list[int], list[int], str]] = {}
    for seed in range(42):
        text, add = TEXTS[seed % len(TEXTS)] * (seed % 7), seed % 2 == 0
        ids = tokenizer.encode(text, add_special_tokens=add)
        expected[seed] = (ids, tokenizer.encode_parts([text]), tokenizer.decode(ids, skip_special_tokens=add))
    with ThreadPoolExecutor(32) as threads:
        assert all(threads.map(work, range(10_000)))


@pytest.mark.parametrize("parallelism", [None, "true", "false"])
def test_a_child_started_after_use_encodes_at_once(
    tmp_path: Path, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch, parallelism: str | None
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if parallelism is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallelism)
    expected = byte_level.encode("hello world", add_special_tokens=False)
    program = (
        "import sys; from pathlib import Path; from lightserve.tokenizer import Tokenizer;"
        "print(Tokenizer.load(Path(sys.argv[1])).encode('hello world', add_special_tokens=False))"
    )
    command = [sys.executable, "-P", "-c", program, str(byte_level_folder(tmp_path))]
    child = subprocess.run(command, capture_output=True, timeout=30, check=True, text=True)
    assert json.loads(child.stdout) == expected
