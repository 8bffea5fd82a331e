"""Facts that hold on every route that generates, streamed or not."""

import json
from typing import Any

import pytest

from lightserve.ipc.messages import ErrorInfo
from tests.lightserve.http_server.endpoints import ENDPOINTS, Endpoint
from tests.lightserve.http_server.fake_engine import Script, prompt_of
from tests.lightserve.http_server.live_server import VOCAB_SIZE, LiveServer

CONTEXT_LEN = 512  # of the server under test
CHAT_OVERHEAD = len("Suser\nE\nSassistant\n")  # tokens of the template, S and E for its special ones

everywhere = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
text_only = pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if not e.is_chat], ids=str)


@everywhere
def test_an_answer_ends_with_stop_and_counts_the_end_of_sequence_id(server: LiveServer, endpoint: Endpoint) -> None:
    reply = endpoint.ask(server.client)
    assert (reply.text, reply.finish_reason, reply.completion_tokens) == ("Hello", "stop", 6)


@everywhere
def test_an_answer_cut_by_the_limit_says_length(server: LiveServer, endpoint: Endpoint) -> None:
    reply = endpoint.ask(server.client, max_tokens=3)
    assert (reply.text, reply.finish_reason, reply.completion_tokens) == ("Hel", "length", 3)


@everywhere
def test_end_of_sequence_as_the_last_allowed_token_says_stop(server: LiveServer, endpoint: Endpoint) -> None:
    reply = endpoint.ask(server.client, max_tokens=6)
    assert (reply.finish_reason, reply.completion_tokens) == ("stop", 6)


@everywhere
def test_a_leading_space_of_the_answer_is_kept(server: LiveServer, endpoint: Endpoint) -> None:
    server.engine.script_for = lambda message: Script("  x")
    assert endpoint.ask(server.client).text == "  x"


@everywhere
def test_any_character_of_an_answer_round_trips(server: LiveServer, endpoint: Endpoint) -> None:
    text = 'a\nb\r\nc\u2028d\u2029e\u0085f"g\\h\x00i\tdata: [DONE]\n\n蓝\U0001f469‍\U0001f680'
    server.engine.script_for = lambda message: Script(text)
    assert endpoint.ask(server.client).text == text


@everywhere
def test_without_a_limit_the_context_is_the_limit(server: LiveServer, endpoint: Endpoint) -> None:
    reply = endpoint.ask(server.client, ignore_eos=True)
    assert reply.prompt_tokens is not None
    assert (reply.finish_reason, reply.completion_tokens) == ("length", CONTEXT_LEN - reply.prompt_tokens)


@everywhere
@pytest.mark.parametrize("limit", [510, 2**31 - 1, 10**18])
def test_a_limit_beyond_the_context_is_clamped(server: LiveServer, endpoint: Endpoint, limit: int) -> None:
    reply = endpoint.ask(server.client, ignore_eos=True, max_tokens=limit)
    assert reply.prompt_tokens is not None
    assert reply.prompt_tokens + (reply.completion_tokens or 0) == min(CONTEXT_LEN, reply.prompt_tokens + limit)


@everywhere
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", 2.5),
        ("max_tokens", 1e18),
        ("max_tokens", True),
        ("temperature", -1),
        ("temperature", 1e30),
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", -3),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-320),  # 0 in float32
        ("repetition_penalty", -2),
        ("presence_penalty", 1e30),
        ("frequency_penalty", -2.5),
        ("seed", 2**63),
        ("seed", -2),
        ("seed", "1"),
        ("ignore_eos", 1),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 1025),
        ("stop", ["x" * 513] * 2),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", ["2"]),
        ("stop_token_ids", list(range(65))),
        ("skip_special_tokens", "no"),
    ],
)
def test_a_bad_value_is_refused_with_its_name(server: LiveServer, endpoint: Endpoint, name: str, value: Any) -> None:
    reply = endpoint.ask(server.client, **{name: value})
    assert reply.status == 400
    assert reply.error is not None
    assert reply.error["param"] == endpoint.param(name)
    assert endpoint.param(name) in reply.error["message"]
    assert not server.engine.requests


@everywhere
@pytest.mark.parametrize("stop_id", [VOCAB_SIZE, 10**6, -1, 2**40])
def test_a_stop_id_outside_the_vocabulary_is_refused(server: LiveServer, endpoint: Endpoint, stop_id: int) -> None:
    reply = endpoint.ask(server.client, stop_token_ids=[stop_id], min_tokens=1)
    assert reply.status == 400
    assert reply.error is not None
    assert reply.error["param"] == endpoint.param("stop_token_ids")


@everywhere
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 1.0),
        ("top_p", 0),
        ("top_k", -1),
        ("top_k", 0),
        ("top_k", 10**9),
        ("temperature", 2),
        ("temperature", 1e-6),
        ("stop", ""),
        ("stop", []),
        ("stop", ["", "x"]),
        ("stop", None),
        ("seed", -1),
        ("min_p", 1),
    ],
)
def test_an_edge_value_is_taken(server: LiveServer, endpoint: Endpoint, name: str, value: Any) -> None:
    reply = endpoint.ask(server.client, **{name: value})
    assert (reply.status, reply.text) == (200, "Hello")


@everywhere
def test_null_means_absent(server: LiveServer, endpoint: Endpoint) -> None:
    names = ["temperature", "top_p", "top_k", "stop", "max_tokens", "seed", "min_tokens", "ignore_eos", "logit_bias"]
    assert endpoint.ask(server.client, seed=1).text == "Hello"
    assert endpoint.ask(server.client, **dict.fromkeys(names)).text == "Hello"
    plain, nulls = (message.sampling for message in server.engine.requests)
    assert (plain.temperature, plain.max_new_tokens) == (nulls.temperature, nulls.max_new_tokens)


@everywhere
def test_empty_stop_strings_are_ignored(server: LiveServer, endpoint: Endpoint) -> None:
    endpoint.ask(server.client, stop=["", "x"])
    assert server.engine.requests[0].text.stop == ("x",)


@everywhere
def test_an_unknown_field_is_refused_by_name(server: LiveServer, endpoint: Endpoint) -> None:
    reply = endpoint.ask(server.client, temprature=1)
    assert reply.status == 400
    assert reply.error is not None
    assert (reply.error["code"], reply.error["param"]) == ("unknown_field", "temprature")


@everywhere
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"prompt": "a",,}',
        b"[]",
        b"null",
        b"3",
        b'"s"',
        b"{}",
        b'{"inputs": "\xff"}',
        b'{"prompt": "\\ud800", "inputs": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"messages":' + b"[" * 100_000,
        b'{"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}",
        b'{"messages": []}',
        b'{"messages": "hi"}',
        b'{"messages": [3]}',
        b"\x00",
        b"\xef\xbb\xbf{}",
    ],
)
def test_a_malformed_body_is_a_400_with_the_error_object(server: LiveServer, endpoint: Endpoint, body: bytes) -> None:
    response = server.client.post(endpoint.path, content=body)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert len(response.content) < 1000


@everywhere
@pytest.mark.parametrize(
    "content_type", [None, "application/x-www-form-urlencoded", "application/json; charset=utf-8", "application/x+json"]
)
def test_the_body_is_json_whatever_the_content_type(
    server: LiveServer, endpoint: Endpoint, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = server.client.post(endpoint.path, content=json.dumps(endpoint.body()), headers=headers)
    assert endpoint.read(response).text == "Hello"


@everywhere
def test_what_the_router_refuses_is_a_proper_status(server: LiveServer, endpoint: Endpoint) -> None:
    refusal = ErrorInfo(429, "queue_full", "Too many requests are waiting.")
    server.engine.script_for = lambda message: Script(refusal=refusal)
    response = server.client.post(endpoint.path, json=endpoint.body())
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    error = response.json()["error"]
    assert (error["code"], error["type"], error["message"]) == ("queue_full", "rate_limit_error", refusal.message)


@everywhere
def test_an_error_after_the_first_token_ends_the_reply(server: LiveServer, endpoint: Endpoint) -> None:
    server.engine.script_for = lambda message: Script(error_after=2, step_s=0.01)
    reply = endpoint.ask(server.client)
    assert reply.status == (200 if endpoint.streamed else 500)
    assert reply.error is not None
    assert reply.error["code"] == "bad_logits"


@everywhere
def test_events_that_come_all_at_once_are_one_answer(server: LiveServer, endpoint: Endpoint) -> None:
    server.engine.script_for = lambda message: Script(burst=True)
    reply = endpoint.ask(server.client)
    assert (reply.text, reply.finish_reason, reply.completion_tokens) == ("Hello", "stop", 6)


@everywhere
def test_an_error_that_comes_with_text_is_not_lost(server: LiveServer, endpoint: Endpoint) -> None:
    server.engine.script_for = lambda message: Script(burst=True, error_after=2)
    reply = endpoint.ask(server.client)
    assert reply.status == (200 if endpoint.streamed else 500)
    assert reply.error is not None
    assert reply.error["code"] == "bad_logits"


@everywhere
@pytest.mark.parametrize("length", [511, 512, 513, 5000])
def test_a_prompt_must_leave_room_for_a_token(server: LiveServer, endpoint: Endpoint, length: int) -> None:
    text = "a" * (length - CHAT_OVERHEAD if endpoint.is_chat else length)
    for prompt in (text,) if endpoint.is_chat else (text, [1] * length):
        reply = endpoint.ask(server.client, prompt, max_tokens=10)
        if length < CONTEXT_LEN:
            assert (reply.finish_reason, reply.completion_tokens) == ("length", 1)
            continue
        assert reply.status == 400
        assert reply.error is not None
        assert reply.error["code"] == "context_length_exceeded"
        assert str(length) in reply.error["message"]
        assert str(CONTEXT_LEN) in reply.error["message"]
    assert endpoint.ask(server.client).text == "Hello"


@text_only
@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused_when_the_tokenizer_adds_nothing(
    server: LiveServer, endpoint: Endpoint, prompt: Any
) -> None:
    assert endpoint.ask(server.client, prompt).status == 400
    assert endpoint.ask(server.client).text == "Hello"


@text_only
@pytest.mark.parametrize("prompt", [[-1], [VOCAB_SIZE], [1.0], [True], [1, "a"], [[1, 2], 3], [2**40], [10**30]])
def test_ids_outside_the_vocabulary_are_refused(server: LiveServer, endpoint: Endpoint, prompt: Any) -> None:
    assert endpoint.ask(server.client, prompt).status == 400
    assert not server.engine.requests


@text_only
def test_ids_run_as_they_are(server: LiveServer, endpoint: Endpoint) -> None:
    assert endpoint.ask(server.client, [0, VOCAB_SIZE - 1]).prompt_tokens == 2
    assert prompt_of(server.engine.requests[0]) == [0, VOCAB_SIZE - 1]


@everywhere
def test_a_nul_in_the_prompt_cuts_nothing(server: LiveServer, endpoint: Endpoint) -> None:
    reply = endpoint.ask(server.client, "A\x00B")
    whole = prompt_of(server.engine.requests[0])
    endpoint.ask(server.client, "AB")
    assert len(whole) == len(prompt_of(server.engine.requests[1])) + 1
    assert reply.prompt_tokens == len(whole)


@everywhere
def test_a_client_given_request_id_is_never_ours(server: LiveServer, endpoint: Endpoint) -> None:
    for _ in range(2):
        response = server.client.post(endpoint.path, json=endpoint.body(), headers={"x-request-id": "7"})
        assert endpoint.read(response).text == "Hello"
    first, second = (message.req_id for message in server.engine.requests)
    assert first != second
