"""Streams as bytes on the wire."""

import pytest

from lightserve.http_server.sse import lightllm_event, sse_event
from tests.lightserve.http_server.endpoints import ENDPOINTS, Endpoint
from tests.lightserve.http_server.fake_engine import Script
from tests.lightserve.http_server.live_server import LiveServer

STREAMED = [endpoint for endpoint in ENDPOINTS if endpoint.streamed]
LINE_ENDS = "\n\r\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e"


@pytest.mark.parametrize("endpoint", STREAMED, ids=str)
def test_proxies_are_told_not_to_hold_a_stream(server: LiveServer, endpoint: Endpoint) -> None:
    with server.client.stream("POST", endpoint.path, json=endpoint.body()) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize("endpoint", STREAMED, ids=str)
def test_each_event_is_flushed_by_itself(server: LiveServer, endpoint: Endpoint) -> None:
    server.engine.script_for = lambda message: Script("abc", step_s=0.05)
    with server.client.stream("POST", endpoint.path, json=endpoint.body()) as response:
        parts = list(response.iter_raw())
    assert len(parts) >= 4
    assert all(part.endswith(b"\n\n") for part in parts)


def test_openai_streams_have_the_space_and_end_with_done(server: LiveServer) -> None:
    endpoint = Endpoint("/v1/completions", streamed=True)
    body = server.client.post(endpoint.path, json=endpoint.body()).content
    assert all(event.startswith(b"data: ") for event in body.split(b"\n\n")[:-1])
    assert body.endswith(b"\n\ndata: [DONE]\n\n")


def test_lightllm_streams_have_no_space_and_no_done(server: LiveServer) -> None:
    endpoint = Endpoint("/generate_stream", streamed=True)
    body = server.client.post(endpoint.path, json=endpoint.body()).content
    assert all(event.startswith(b'data:{"token":') for event in body.split(b"\n\n")[:-1])


def test_an_event_is_one_line_by_anybodys_reckoning() -> None:
    for encode in (sse_event, lightllm_event):
        event = encode({"text": f"a{LINE_ENDS}b"}).decode()
        assert event.endswith("\n\n")
        assert len(event.removesuffix("\n\n").splitlines()) == 1


def test_a_lightllm_event_tells_its_token(server: LiveServer) -> None:
    endpoint = Endpoint("/generate_stream", streamed=True)
    events = server.client.post(endpoint.path, json=endpoint.body(max_tokens=2)).text.split("\n\n")
    token = '{"id":101,"text":"e","logprob":-0.5,"special":false,"count_output_tokens":2,"prompt_tokens":2}'
    rest = '"generated_text":null,"finished":true,"finish_reason":"length","details":null'
    assert events[1] == f'data:{{"token":{token},{rest}}}'
