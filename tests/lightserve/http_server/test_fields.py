"""What a client is told of a field that is missing, unknown or in the wrong place."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightserve.errors import RequestError
from lightserve.http_server.body import decode_body
from lightserve.http_server.generate import GenerateRequest
from lightserve.http_server.info import DetokenizeRequest, TokenizeRequest, TokensRequest
from lightserve.http_server.openai_bodies import ChatRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def refusal_of(body: Any, body_type: type[msgspec.Struct]) -> RequestError:
    with pytest.raises(RequestError) as error:
        decode_body(json.dumps(body).encode(), body_type)
    assert error.value.status == 400
    return error.value


@pytest.mark.parametrize(
    ("body_type", "name"),
    [
        (GenerateRequest, "inputs"),
        (ChatRequest, "messages"),
        (CompletionRequest, "prompt"),
        (TokensRequest, "text"),
        (DetokenizeRequest, "tokens"),
    ],
)
def test_a_missing_field_is_named(body_type: type[msgspec.Struct], name: str) -> None:
    error = refusal_of({}, body_type)
    assert (error.message, error.param) == (f"The field `{name}` is missing.", name)


@pytest.mark.parametrize(
    ("body", "body_type", "message", "param"),
    [
        ({"text": 1}, GenerateRequest, "Unknown field `text`. The fields are: `inputs`, `parameters`.", "text"),
        ({"txt": "a"}, TokensRequest, "Unknown field `txt`. The fields are: `text`.", "txt"),
        (
            {"text": "a"},
            TokenizeRequest,
            "Unknown field `text`. The fields are: `prompt`, `messages`, `model`.",
            "text",
        ),
        (
            {"stream_options": {"usage": True}},
            ChatRequest,
            "Unknown field `usage` in `stream_options`. The fields are: `include_usage`, `continuous_usage_stats`, "
            "`include_obfuscation`.",
            "stream_options.usage",
        ),
    ],
)
def test_a_short_list_of_fields_is_told_whole(
    body: Any, body_type: type[msgspec.Struct], message: str, param: str
) -> None:
    error = refusal_of(body, body_type)
    assert (error.message, error.param, error.code) == (message, param, "unknown_field")


@pytest.mark.parametrize(
    ("body", "body_type"),
    [
        ({"messages": MESSAGES, "temprature": 1}, ChatRequest),
        ({"prompt": "a", "temprature": 1}, CompletionRequest),
        ({"inputs": "a", "parameters": {"temprature": 1}}, GenerateRequest),
    ],
)
def test_of_a_long_list_the_closest_are_told(body: Any, body_type: type[msgspec.Struct]) -> None:
    error = refusal_of(body, body_type)
    assert error.param == "temprature"
    assert error.message.endswith("The closest are: `temperature`.")


def test_a_field_that_is_not_supported_is_not_proposed() -> None:
    assert "`logprobs`" not in refusal_of({"messages": MESSAGES, "logprob": True}, ChatRequest).message


def test_where_nothing_is_close_the_documentation_is_named() -> None:
    error = refusal_of({"messages": MESSAGES, "zzz": 1}, ChatRequest)
    assert error.message == "Unknown field `zzz`. All fields are listed at /docs."


@pytest.mark.parametrize(
    ("body", "body_type", "name", "place"),
    [
        ({"inputs": "a", "max_new_tokens": 2}, GenerateRequest, "max_new_tokens", "parameters"),
        ({"inputs": "a", "temperature": 0}, GenerateRequest, "temperature", "parameters"),
        ({"prompt": "a", "include_usage": True}, CompletionRequest, "include_usage", "stream_options"),
    ],
)
def test_a_field_that_belongs_one_level_down_is_sent_there(
    body: Any, body_type: type[msgspec.Struct], name: str, place: str
) -> None:
    error = refusal_of(body, body_type)
    assert (error.message, error.param) == (f"Unknown field `{name}`. It belongs in `{place}`.", name)


@pytest.mark.parametrize("body_type", [GenerateRequest, ChatRequest, CompletionRequest])
@given(name=st.text() | st.sampled_from(["x` - at `$.parameters", "x` - at `$.a.b", "x`", "$.x", "x" * 65, "x" * 9999]))
def test_whatever_an_unknown_field_is_called_the_answer_is_short(body_type: type[msgspec.Struct], name: str) -> None:
    assume(name not in body_type.__struct_fields__)
    error = refusal_of({name: 1}, body_type)
    assert error.code == "unknown_field"
    assert len(error.message) < 300
    assert len(error.param or "") <= 64
