import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer

from lightserve.detokenizer.incremental import IncrementalDecoder, TextTable, TextTables
from lightserve.tokenizer import Tokenizer
from tests.vocabularies import BOS, IM_END, MARK, sentencepiece_folder

# Whole characters, parts of characters, bytes that are never UTF-8, and nothing.
TOKENS = [b"a", b" b", "你".encode(), b"\xe4", b"\xbd", b"\xa0", b"\xf0\x9f", b"\xa6\x99", b"\xff", b"\xc0\x80", b""]


def table_of(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> TextTable:
    tables = TextTables(tokenizer)
    return tables.without_special if skip_special_tokens else tables.with_special


def chunks(table: TextTable, token_ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(table)
    return [*map(decoder.feed, token_ids), decoder.finish()]


@given(token_ids=st.lists(st.integers(0, len(TOKENS) - 1)))
def test_joined_chunks_are_the_text_of_all_bytes(token_ids: list[int]) -> None:
    whole = b"".join(TOKENS[i] for i in token_ids).decode("utf-8", "replace")
    assert "".join(chunks(TextTable(TOKENS), token_ids)) == whole


@given(token_ids=st.lists(st.integers(0, len(TOKENS) - 1)))
def test_at_most_the_bytes_of_one_unfinished_character_are_held_back(token_ids: list[int]) -> None:
    decoder = IncrementalDecoder(TextTable(TOKENS))
    raw, shown = b"", ""
    for token_id in token_ids:
        raw += TOKENS[token_id]
        shown += decoder.feed(token_id)
        held = raw.decode("utf-8", "replace").removeprefix(shown)
        assert held in ("", "\ufffd")


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
@given(data=st.data())
def test_joined_chunks_are_the_whole_decode_of_any_ids(
    request: pytest.FixtureRequest, family: str, skip_special_tokens: bool, data: st.DataObject
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(family)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    text = "".join(chunks(table_of(tokenizer, skip_special_tokens=skip_special_tokens), token_ids))
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    assert (text.removeprefix(" ") if tokenizer.strips_first_space else text) == whole


@given(prompt=st.text(min_size=1), answer=st.text())
def test_chunks_continue_the_librarys_decode_of_the_prompt(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, answer: str
) -> None:
    reference, tokenizer = _reference(tmp_path_factory)
    prompt_ids = reference.encode("red " + prompt, add_special_tokens=False).ids
    answer_ids = reference.encode(answer, add_special_tokens=False).ids
    shown = "".join(chunks(table_of(tokenizer, skip_special_tokens=True), answer_ids))
    before = reference.decode(prompt_ids, skip_special_tokens=True)
    assert reference.decode(prompt_ids + answer_ids, skip_special_tokens=True) == before + shown


def _reference(factory: pytest.TempPathFactory) -> tuple[LibraryTokenizer, Tokenizer]:
    if not _SHARED:
        folder = sentencepiece_folder(factory.mktemp("reference"))
        _SHARED.append((LibraryTokenizer.from_file(str(folder / "tokenizer.json")), Tokenizer.load(folder)))
    return _SHARED[0]


_SHARED: list[tuple[LibraryTokenizer, Tokenizer]] = []


def test_no_chunk_cuts_a_character(byte_level: Tokenizer) -> None:
    text = "你好，世界 👨‍👩‍👧 🦙"
    shown = chunks(TextTables(byte_level).without_special, byte_level.encode(text, add_special_tokens=False))
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)


def test_lone_bytes_keep_flowing(byte_level: Tokenizer) -> None:
    lone = byte_level.bytes_table.index(b"\xff")
    assert chunks(TextTables(byte_level).without_special, [lone] * 3000) == ["\ufffd"] * 3000 + [""]


def test_an_unfinished_character_is_shown_once_it_cannot_be_finished(byte_level: Tokenizer) -> None:
    first, letter = byte_level.bytes_table.index(b"\xe4"), byte_level.bytes_table.index(b"a")
    table = TextTables(byte_level).without_special
    assert chunks(table, [first, letter]) == ["", "\ufffda", ""]
    assert chunks(table, [first]) == ["", "\ufffd"]
    assert chunks(table, [first, first]) == ["", "\ufffd", "\ufffd"]


def test_ids_without_text_do_not_stop_the_flow(byte_level: Tokenizer) -> None:
    skipped, letter = byte_level.special_id_of[IM_END], byte_level.bytes_table.index(b"a")
    assert chunks(TextTables(byte_level).without_special, [letter, skipped] * 2000) == ["a", ""] * 2000 + [""]


def test_a_skipped_token_within_a_character_does_not_break_it(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("你", add_special_tokens=False)
    skipped = byte_level.special_id_of[IM_END]
    assert chunks(TextTables(byte_level).without_special, [ids[0], skipped, *ids[1:]]) == ["", "", "你", ""]


@pytest.mark.parametrize("text", [" red green", "  red"])
def test_the_first_space_of_an_answer_is_kept(byte_level: Tokenizer, sentencepiece: Tokenizer, text: str) -> None:
    pieces = sentencepiece.encode(text[1:], add_special_tokens=False)  # this family adds the first space itself
    assert "".join(chunks(TextTables(sentencepiece).without_special, pieces)) == text
    ids = byte_level.encode(text, add_special_tokens=False)
    assert "".join(chunks(TextTables(byte_level).without_special, ids)) == text


def test_nothing_stands_between_added_tokens_and_text(byte_level: Tokenizer) -> None:
    text = f"{MARK}up{MARK}9"
    ids = byte_level.encode(text, add_special_tokens=False)
    for skip_special_tokens in (True, False):
        assert "".join(chunks(table_of(byte_level, skip_special_tokens=skip_special_tokens), ids)) == text


def test_special_tokens_are_shown_on_demand(sentencepiece: Tokenizer) -> None:
    ids = [sentencepiece.special_id_of[BOS], *sentencepiece.encode("red", add_special_tokens=False)]
    assert "".join(chunks(TextTables(sentencepiece).with_special, ids)) == f"{BOS} red"
    assert "".join(chunks(TextTables(sentencepiece).without_special, ids)) == " red"


def test_spaces_are_never_cleaned_up(byte_level: Tokenizer) -> None:
    text = "Hello , world ! do n't ( x ) ."
    ids = byte_level.encode(text, add_special_tokens=False)
    assert "".join(chunks(TextTables(byte_level).without_special, ids)) == text
