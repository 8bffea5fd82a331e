"""``/metrics``: every request counted once, gauges back to nothing when nobody is left."""

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from lightserve.http_server.openai_formats import CompletionStreamFormat
from lightserve.http_server.status import Phase
from lightserve.ipc.messages import ErrorInfo
from lightserve.tokenizer import Tokenizer
from tests.lightserve.http_server.endpoints import ENDPOINTS, Endpoint
from tests.lightserve.http_server.fake_engine import Script
from tests.lightserve.http_server.live_server import LiveServer

WHOLE = Endpoint("/v1/completions", streamed=False)
STREAM = Endpoint("/v1/completions", streamed=True)


def metrics(server: LiveServer) -> dict[str, float]:
    text = server.client.get("/metrics").text
    samples = re.findall(r"^lightserve_(\S+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in samples}


def requests_by_reason(server: LiveServer) -> dict[str, float]:
    text = server.client.get("/metrics").text
    samples = re.findall(r'^lightserve_requests_total{reason="(\w+)"} (\S+)$', text, re.MULTILINE)
    return {reason: float(value) for reason, value in samples}


def test_requests_are_counted_by_how_they_ended(fresh_server: LiveServer) -> None:
    server = fresh_server
    usages = [WHOLE.ask(server.client) for _ in range(4)]
    usages += [STREAM.ask(server.client, max_tokens=2) for _ in range(3)]
    server.engine.script_for = lambda message: Script(silent_after=0)
    for _ in range(2):
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(WHOLE.path, json=WHOLE.body(), timeout=0.1)
    server.engine.script_for = lambda message: Script(refusal=ErrorInfo(429, "queue_full", "full"))
    assert WHOLE.ask(server.client).status == 429
    assert WHOLE.ask(server.client, max_tokens=0).status == 400
    server.engine.script_for = lambda message: Script(error_after=0)
    assert WHOLE.ask(server.client).status == 500
    server.until_idle()
    assert requests_by_reason(server) == {"stop": 4, "length": 3, "abort": 2, "refused": 2, "error": 1}
    now = metrics(server)
    assert now["generated_tokens_total"] == sum(usage.completion_tokens or 0 for usage in usages)
    assert now["prompt_tokens_total"] == sum(usage.prompt_tokens or 0 for usage in usages)


def draining_amid(server: LiveServer) -> Callable[..., list[int]]:
    """Make a tokenizer's method that the server begins to drain in."""

    def encode(*args: object, **flags: object) -> list[int]:
        server.front.status.phase = Phase.DRAINING
        return [1]

    return encode


def failing(*args: object, **kwargs: object) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
def test_a_drain_that_begins_amid_the_tokenizing_counts_every_choice_as_an_error(
    fresh_server: LiveServer, monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", draining_amid(fresh_server))
    choices = {} if endpoint.is_lightllm else {"n": 3}
    assert endpoint.ask(fresh_server.client, **choices).status == 503
    assert requests_by_reason(fresh_server) == {"error": choices.get("n", 1)}


def test_what_comes_while_a_server_drains_counts_as_an_error(fresh_server: LiveServer) -> None:
    fresh_server.front.status.phase = Phase.DRAINING
    for endpoint in ENDPOINTS:
        assert endpoint.ask(fresh_server.client).status == 503
    assert requests_by_reason(fresh_server) == {"error": len(ENDPOINTS)}


def test_a_bug_before_the_router_knows_of_a_request_counts_as_an_error(
    fresh_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", failing)
    for endpoint in ENDPOINTS:
        assert endpoint.ask(fresh_server.client).status == 500
    assert requests_by_reason(fresh_server) == {"error": len(ENDPOINTS)}


def test_a_bug_amid_a_stream_counts_every_choice_that_still_runs_as_an_error(
    fresh_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompletionStreamFormat, "write", failing)
    fresh_server.engine.script_for = lambda message: Script("x" * 400, step_s=0.02)
    with pytest.raises(httpx.RemoteProtocolError):
        STREAM.ask(fresh_server.client, n=3)
    fresh_server.until_idle()
    assert len(fresh_server.engine.aborts) == 1
    assert requests_by_reason(fresh_server) == {"error": 3}


def test_gauges_are_back_to_zero_when_all_clients_have_left(fresh_server: LiveServer) -> None:
    server = fresh_server
    server.engine.script_for = lambda message: Script("x" * 400, step_s=0.02)
    streams = [
        server.client.send(server.client.build_request("POST", STREAM.path, json=STREAM.body()), stream=True)
        for _ in range(50)
    ]
    busy = metrics(server)
    assert (busy["open_http_requests"], busy["running_requests"], busy["kv_slots_used"]) == (50, 50, 500)
    for stream in streams:
        stream.close()
    server.until_idle()
    idle = metrics(server)
    for gauge in ("open_http_requests", "running_requests", "waiting_requests", "kv_slots_used", "kv_slots_promised"):
        assert idle[gauge] == 0
    assert idle["kv_slots_total"] == 4096


def test_each_choice_is_counted_and_each_prompt_once(fresh_server: LiveServer) -> None:
    server = fresh_server
    server.client.post(WHOLE.path, json={"prompt": ["ab", "c"], "n": 3})
    now = metrics(server)
    assert now['requests_total{reason="stop"}'] == 6
    assert now["prompt_tokens_total"] == 3
    assert now["generated_tokens_total"] == 36
