import msgspec
import numpy as np
import pytest
from benchmark.api import API_FAMILIES, Answer, Sampling
from benchmark.prompt import Prompt

_GREEDY = Sampling(temperature=0.0, ignore_eos=True)
_IDS = Prompt(np.array([5, 6], dtype=np.int32), 2, 16)


def _read(api: str, *events: object) -> Answer:
    answer = Answer()
    for event in events:
        data = event if isinstance(event, bytes) else msgspec.json.encode(event)
        API_FAMILIES[api].read_event(data, answer)
    return answer


def _token(text: str, count: int, **more: object) -> dict[str, object]:
    token = {"id": 1, "text": text, "count_output_tokens": count, "prompt_tokens": 9}
    return {"token": token, "generated_text": None, "finished": False, "finish_reason": None, **more}


def test_a_lightserve_body_asks_for_the_length_and_ignores_eos() -> None:
    body = API_FAMILIES["lightserve"].write_body(_IDS, _GREEDY, "")
    assert body == {"inputs": [5, 6], "parameters": {"max_new_tokens": 16, "do_sample": False, "ignore_eos": True}}


def test_an_openai_body_asks_for_usage() -> None:
    body = API_FAMILIES["openai-completions"].write_body(_IDS, Sampling(0.5, False), "m")
    assert body == {
        "prompt": [5, 6],
        "model": "m",
        "max_tokens": 16,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_chat_body_holds_one_user_message() -> None:
    body = API_FAMILIES["openai-chat"].write_body(Prompt("Hello", 3, 8), _GREEDY, "m")
    assert body["messages"] == [{"role": "user", "content": "Hello"}]


def test_lightserve_tokens_are_counted_by_the_server() -> None:
    answer = _read("lightserve", _token("a", 1), _token("", 2), _token("é", 3, finished=True, finish_reason="stop"))
    assert (answer.num_events, answer.output_tokens, answer.prompt_tokens) == (3, 3, 9)
    assert answer.finished
    assert answer.finish_reason == "stop"


def test_a_closing_event_without_a_new_token_is_no_token() -> None:
    answer = _read("lightserve", _token("a", 1), _token("held back", 1, finished=True, finish_reason="length"))
    assert (answer.num_events, answer.output_tokens) == (1, 1)


def test_the_role_and_the_finish_of_a_chat_are_no_tokens() -> None:
    answer = _read(
        "openai-chat",
        {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": "Hi"}, "finish_reason": None}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}},
        b"[DONE]",
    )
    assert (answer.num_events, answer.output_tokens, answer.prompt_tokens) == (1, 2, 4)
    assert answer.finished


def test_a_completion_event_without_text_is_a_token_of_an_unfinished_character() -> None:
    answer = _read("openai-completions", {"choices": [{"text": "", "finish_reason": None}]})
    assert answer.num_events == 1
    assert not answer.has_text


def test_reasoning_counts_as_output() -> None:
    answer = _read("openai-chat", {"choices": [{"delta": {"reasoning_content": "Hm"}, "finish_reason": None}]})
    assert answer.num_events == 1
    assert answer.has_text


@pytest.mark.parametrize(
    ("api", "event"),
    [
        ("lightserve", {"error": {"message": "the worker died", "code": 500}}),
        ("openai-chat", {"error": {"message": "the worker died"}}),
        ("openai-completions", {"object": "error", "message": "the worker died"}),
        ("openai-completions", {"error": "the worker died"}),
    ],
)
def test_an_error_event_is_kept_as_its_message(api: str, event: object) -> None:
    assert _read(api, event).error == "the worker died"


@pytest.mark.parametrize("api", sorted(API_FAMILIES))
@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"choices": 3, "token": 3}'])
def test_a_malformed_event_is_a_decode_error(api: str, data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        API_FAMILIES[api].read_event(data, Answer())
