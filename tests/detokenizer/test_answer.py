import pytest

from lightserve.detokenizer.answer import AnswerFactory
from lightserve.ipc.messages import TextParams
from lightserve.tokenizer import Tokenizer
from tests.vocabularies import IM_END, IM_START


def text_of(answers: AnswerFactory, params: TextParams, token_ids: list[int]) -> tuple[str, str | None]:
    """Feed ids one by one until the answer ends, then take everything."""
    answer = answers.make(1, params)
    for token_id in token_ids:
        answer.feed(token_id)
        if answer.ended:
            break
    else:
        answer.finish("length")
    event = answer.take_event()
    return event.text, event.finish_reason


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (IM_END, "hello"),
        ("lo" + IM_END, "hel"),
        (IM_END + "\n\n" + IM_START, "hello"),
        (IM_START, "hello\n\n"),
    ],
)
def test_a_stop_string_with_a_hidden_special_token_is_found(
    byte_level: Tokenizer, answers: AnswerFactory, stop: str, text: str
) -> None:
    ids = byte_level.encode(f"hello{IM_END}\n\n{IM_START} world", add_special_tokens=False)
    assert text_of(answers, TextParams(stop=(stop,)), ids) == (text, "stop")


def test_a_hidden_special_token_leaves_no_trace_in_the_text(byte_level: Tokenizer, answers: AnswerFactory) -> None:
    ids = byte_level.encode(f"a{IM_END}b{IM_END}", add_special_tokens=False)
    assert text_of(answers, TextParams(stop=(IM_END + "x",)), ids) == ("ab", "length")


def test_a_shown_special_token_is_found_in_the_text(byte_level: Tokenizer, answers: AnswerFactory) -> None:
    ids = byte_level.encode(f"a{IM_START}b{IM_END}c", add_special_tokens=False)
    params = TextParams(stop=(IM_END,), skip_special_tokens=False)
    assert text_of(answers, params, ids) == (f"a{IM_START}b", "stop")


def test_a_special_token_spelled_out_in_text_stops_too(byte_level: Tokenizer, answers: AnswerFactory) -> None:
    ids = byte_level.encode_parts([f"a{IM_END}b"])
    assert text_of(answers, TextParams(stop=(IM_END,)), ids) == ("a", "stop")


@pytest.mark.parametrize(("min_new_tokens", "text"), [(0, ""), (1, ""), (2, "a"), (3, "aa"), (4, "aaa"), (5, "aaaa")])
def test_stop_strings_are_not_looked_for_too_early(
    byte_level: Tokenizer, answers: AnswerFactory, min_new_tokens: int, text: str
) -> None:
    ids = byte_level.encode("aaaa", add_special_tokens=False)
    reason = "stop" if min_new_tokens < 5 else "length"
    assert text_of(answers, TextParams(stop=("a",), min_new_tokens=min_new_tokens), ids) == (text, reason)


def test_what_was_held_back_is_released_at_the_end(byte_level: Tokenizer, answers: AnswerFactory) -> None:
    ids = byte_level.encode("hello ab", add_special_tokens=False)
    assert text_of(answers, TextParams(stop=("abc",)), ids) == ("hello ab", "length")


def test_an_unfinished_character_at_the_end_can_complete_a_stop_string(
    byte_level: Tokenizer, answers: AnswerFactory
) -> None:
    ids = [byte_level.bytes_table.index(b"a"), byte_level.bytes_table.index(b"\xe4")]
    assert text_of(answers, TextParams(stop=("\ufffd",)), ids) == ("a", "stop")


def test_an_event_carries_what_came_since_the_last(byte_level: Tokenizer, answers: AnswerFactory) -> None:
    answer = answers.make(7, TextParams())
    (letter,) = byte_level.encode("x", add_special_tokens=False)
    answer.count(b"1234", b"abcd")
    answer.feed(letter)
    first = answer.take_event()
    assert (first.req_id, first.text, first.token_ids, first.logprobs) == (7, "x", b"1234", b"abcd")
    second = answer.take_event()
    assert (second.text, second.token_ids, second.logprobs, second.finish_reason) == ("", b"", b"", None)


def test_an_empty_stop_string_is_refused(answers: AnswerFactory) -> None:
    with pytest.raises(ValueError, match="empty"):
        answers.make(1, TextParams(stop=("",)))
