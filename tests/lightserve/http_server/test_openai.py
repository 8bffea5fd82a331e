"""OpenAI's API in its own shapes, read strictly and with the official client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.lightserve.http_server.endpoints import sse_payloads
from tests.lightserve.http_server.fake_engine import Script, prompt_of
from tests.lightserve.http_server.live_server import MODEL, LiveServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def stream_events(server: LiveServer, path: str, **body: Any) -> list[Any]:
    response = server.client.post(path, json={"stream": True, **body})
    assert response.status_code == 200, response.text
    *payloads, last = sse_payloads(response.text)
    assert last == "[DONE]"
    return [json.loads(payload) for payload in payloads]


def test_the_official_client_chats(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert reply.choices[0].message.content == "Hello"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == MODEL
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 6


def test_the_official_client_streams_a_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=3,
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hel"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


def test_the_official_client_completes_texts_and_ids(client: openai.OpenAI) -> None:
    assert client.completions.create(model=MODEL, prompt="hi").choices[0].text == "Hello"
    chunks = client.completions.create(model=MODEL, prompt=[1, 2], stream=True, max_tokens=2)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "He"


def test_the_official_client_understands_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=[1] * 600)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nope", prompt="hi")


def test_the_official_client_meets_an_error_inside_a_stream(server: LiveServer, client: openai.OpenAI) -> None:
    server.engine.script_for = lambda message: Script(error_after=2, step_s=0.01)
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.completions.create(model=MODEL, prompt="hi", stream=True))


def test_the_listed_model_is_usable_as_it_is(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    assert client.completions.create(model=model.id, prompt="hi").model == model.id


def test_a_chat_stream_has_the_role_then_text_then_the_reason(server: LiveServer) -> None:
    events = stream_events(server, CHAT, messages=MESSAGES)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert events[0]["model"] == MODEL


def test_a_chunk_that_says_nothing_is_not_sent(server: LiveServer) -> None:
    events = stream_events(server, COMPLETIONS, prompt="hi")
    assert [event["choices"][0]["text"] for event in events] == [*"Hello", ""]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("step_s", [0.0, 0.01])
def test_nothing_is_sent_for_an_id_that_has_no_text_yet(server: LiveServer, step_s: float) -> None:
    server.engine.script_for = lambda message: Script("Hi!", ids_per_letter=3, step_s=step_s)
    completion = stream_events(server, COMPLETIONS, prompt="hi", stream_options={"include_usage": True})
    assert [choice["text"] for event in completion for choice in event["choices"]] == ["H", "i", "!", ""]
    chat = stream_events(server, CHAT, messages=MESSAGES, stream_options={"include_usage": True})
    deltas = [choice["delta"] for event in chat for choice in event["choices"]]
    texts = [{"content": letter} for letter in "Hi!"]
    assert deltas == [{"role": "assistant", "content": ""}, *texts, {}]
    assert [events[-1]["usage"]["completion_tokens"] for events in (completion, chat)] == [10, 10]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_comes_last_and_only_when_asked_for(server: LiveServer, path: str, options: dict[str, bool]) -> None:
    content: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    events = stream_events(server, path, **content, stream_options=options)
    wanted = bool(options and options.get("include_usage"))
    assert [not event["choices"] for event in events] == [False] * (len(events) - wanted) + [True] * wanted
    assert ("usage" in events[-1]) == wanted
    if wanted:
        assert events[-1]["usage"]["completion_tokens"] == 6


def test_running_usage_never_falls_and_ends_at_the_total(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream_events(server, CHAT, messages=MESSAGES, n=2, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 12


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stream_options_without_stream_are_refused(server: LiveServer, path: str) -> None:
    content: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    response = server.client.post(path, json={**content, "stream_options": {"include_usage": True}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


def test_max_completion_tokens_wins_over_max_tokens(server: LiveServer) -> None:
    for limits in ({"max_completion_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": 4}):
        reply = server.client.post(CHAT, json={"messages": MESSAGES, **limits}).json()
        assert reply["usage"]["completion_tokens"] == 2


def test_choices_of_several_prompts_come_in_their_order(server: LiveServer) -> None:
    server.engine.script_for = lambda message: Script(chr(prompt_of(message)[0] + 33))
    body = {"prompt": ["A", "BB"], "n": 2}
    reply = server.client.post(COMPLETIONS, json=body).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    firsts = [prompt_of(message)[0] for message in server.engine.requests]
    assert [choice["text"] for choice in reply["choices"]] == [chr(first + 33) for first in firsts]
    assert firsts == [firsts[0], firsts[0], firsts[2], firsts[2]]
    counts = {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert reply["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


def test_cached_prompt_tokens_count_once_for_all_choices_of_a_prompt(server: LiveServer) -> None:
    server.engine.script_for = lambda message: Script(cached_len=len(prompt_of(message)) - 1)
    body = {"prompt": ["AAA", "BBBB"], "n": 2}
    whole = server.client.post(COMPLETIONS, json=body).json()
    streamed = stream_events(server, COMPLETIONS, **body, stream_options={"include_usage": True})
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 + 3}
    assert streamed[-1]["usage"] == whole["usage"]


def test_every_choice_of_a_stream_ends_with_its_reason(server: LiveServer) -> None:
    events = stream_events(server, CHAT, messages=MESSAGES, n=3, stream_options={"include_usage": True})
    choices = [choice for event in events for choice in event["choices"]]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hello"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
    assert events[-1]["usage"]["completion_tokens"] == 18


def test_a_batch_of_id_lists_gives_one_choice_each(server: LiveServer) -> None:
    reply = server.client.post(COMPLETIONS, json={"prompt": [[1, 2], [3]]}).json()
    assert len(reply["choices"]) == 2
    assert [prompt_of(message) for message in server.engine.requests] == [[1, 2], [3]]


@pytest.mark.parametrize(
    "prompt", [[], [[]], [""], ["a", ""], [[1], []], ["a", [1]], [1, [2]], {}, 5, ["a"] * 1025, [["a"]]]
)
def test_a_bad_list_of_prompts_is_refused_whole(server: LiveServer, prompt: Any) -> None:
    response = server.client.post(COMPLETIONS, json={"prompt": prompt})
    assert response.status_code == 400
    assert len(response.content) < 1000
    assert not server.engine.requests


@pytest.mark.parametrize("n", [0, -1, 129, 5_000_000, 1.5, "2"])
def test_a_bad_number_of_choices_is_refused(server: LiveServer, n: Any) -> None:
    response = server.client.post(CHAT, json={"messages": MESSAGES, "n": n})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


def test_prompts_times_n_are_bounded(server: LiveServer) -> None:
    response = server.client.post(COMPLETIONS, json={"prompt": ["a"] * 1000, "n": 2})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


def seeds_of(server: LiveServer, **body: Any) -> list[int]:
    server.engine.requests.clear()
    assert server.client.post(CHAT, json={"messages": MESSAGES, **body}).status_code == 200
    return [message.sampling.seed for message in server.engine.requests]


def test_choices_have_different_seeds_that_repeat_with_the_given_one(server: LiveServer) -> None:
    assert seeds_of(server, n=4, seed=1) == [1, 2, 3, 4]
    assert len(set(seeds_of(server, n=4))) == 4
    assert seeds_of(server) != seeds_of(server)
    assert seeds_of(server, n=2, seed=2**63 - 1) == [2**63 - 1, 0]


@pytest.mark.parametrize("model", ["nope", "", "models/tiny"])
def test_an_unknown_model_is_a_404_that_names_the_served_one(server: LiveServer, model: str) -> None:
    for path, content in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "hi"})):
        response = server.client.post(path, json={**content, "model": model})
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["code"] == "model_not_found"
        assert f"`{MODEL}`" in error["message"]


def test_a_missing_route_does_not_look_like_a_missing_model(server: LiveServer) -> None:
    assert server.client.post("/v1/nope").json()["error"]["code"] == "not_found"
    assert server.client.get(CHAT).json()["error"]["code"] == "method_not_allowed"
    assert server.client.get("/v1/models/nope").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "logprobs", True),
        (CHAT, "top_logprobs", 3),
        (CHAT, "logit_bias", {"5": 1}),
        (CHAT, "logit_bias", {"1000000": 1}),
        (CHAT, "tools", [{"type": "function"}]),
        (CHAT, "tool_choice", "required"),
        (CHAT, "response_format", {"type": "json_object"}),
        (CHAT, "audio", {}),
        (COMPLETIONS, "logprobs", 0),
        (COMPLETIONS, "logprobs", 1),
        (COMPLETIONS, "echo", True),
        (COMPLETIONS, "suffix", "x"),
        (COMPLETIONS, "best_of", 2),
    ],
)
def test_what_is_not_supported_yet_is_refused_by_name(server: LiveServer, path: str, field: str, value: Any) -> None:
    content: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    response = server.client.post(path, json={**content, field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)


def test_harmless_values_and_ignored_fields_are_taken(server: LiveServer) -> None:
    harmless = {
        "logprobs": False,
        "top_logprobs": 0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "functions": None,
    }
    assert server.client.post(CHAT, json={"messages": MESSAGES, **harmless}).status_code == 200
    completion = {"prompt": "hi", "echo": False, "best_of": 1, "suffix": None, "logprobs": None}
    assert server.client.post(COMPLETIONS, json=completion).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_null_means_absent_for_every_field(server: LiveServer, path: str) -> None:
    content: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    schema = server.client.get("/openapi.json").json()["components"]["schemas"]
    fields = schema["ChatRequest" if path == CHAT else "CompletionRequest"]["properties"].keys()
    nulls = dict.fromkeys(fields - content.keys())
    assert {"stream", "n", "logit_bias", "stop", "stream_options"} < nulls.keys()
    reply = server.client.post(path, json={**content, **nulls}).json()
    assert reply["usage"] == server.client.post(path, json=content).json()["usage"]


def test_a_bad_conversation_gets_a_short_answer_that_repeats_nothing(server: LiveServer) -> None:
    secret = "hunter2"
    messages = [{"role": 5, "content": secret}] * 3000
    response = server.client.post(CHAT, json={"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert len(response.content) < 1000
    assert secret not in response.text


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_message_without_content_generates_nothing(server: LiveServer, path: str) -> None:
    response = server.client.post(path, json={"messages": [{"role": "user"}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert "`content`" in response.json()["error"]["message"]
    assert not server.engine.requests


def test_a_long_unknown_field_is_not_repeated(server: LiveServer) -> None:
    response = server.client.post(CHAT, json={"messages": MESSAGES, "x" * 1000: 1})
    assert response.status_code == 400
    assert len(response.content) < 300
