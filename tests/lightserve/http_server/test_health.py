"""What the server says of itself: health, load, tokens."""

import threading
from collections.abc import Iterator

import pytest

from lightserve.http_server.status import Phase
from lightserve.ipc.messages import LoadMsg
from tests.lightserve.http_server.endpoints import ENDPOINTS, Endpoint
from tests.lightserve.http_server.fake_engine import Script
from tests.lightserve.http_server.live_server import LiveServer

GENERATE_STREAM = Endpoint("/generate_stream", streamed=True)


@pytest.fixture
def phased_server(server: LiveServer) -> Iterator[LiveServer]:
    yield server
    server.front.status.phase = Phase.SERVING


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.DRAINING, Phase.DOWN])
def test_a_server_that_takes_no_requests_says_so(phased_server: LiveServer, phase: Phase) -> None:
    phased_server.front.status.phase = phase
    client = phased_server.client
    assert client.get("/liveness").status_code == 200
    for path in ("/health", "/readiness"):
        response = client.get(path)
        assert response.status_code == 503
        assert response.json()["error"]["message"] == phase.value
        assert client.head(path).status_code == 503
    for endpoint in ENDPOINTS:
        response = client.post(endpoint.path, json=endpoint.body())
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"


def test_a_serving_server_is_healthy(server: LiveServer) -> None:
    for path in ("/health", "/readiness", "/liveness"):
        assert server.client.get(path).json() == {"status": "ok"}


def test_a_silent_engine_is_unhealthy_only_while_requests_wait(
    fresh_server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fresh_server
    monkeypatch.setattr("lightserve.http_server.pulse.LEAST_LIMIT_S", 0.05)
    server.engine.script_for = lambda message: Script(silent_after=1)
    server.until(lambda: server.client.get("/health").status_code == 200)
    with server.client.stream("POST", "/generate_stream", json=GENERATE_STREAM.body()) as response:
        lines = response.iter_lines()
        next(lines)
        server.until(lambda: server.client.get("/health").status_code == 503)
        assert server.client.get("/health").json()["error"]["code"] == "engine_stalled"
    server.until_idle()
    assert server.client.get("/health").status_code == 200


def test_probes_succeed_while_many_streams_run(server: LiveServer) -> None:
    server.engine.script_for = lambda message: Script("x" * 400)
    threads = [threading.Thread(target=GENERATE_STREAM.ask, args=(server.client,)) for _ in range(50)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for path in ("/health", "/metrics"):
            assert server.client.get(path, timeout=10).status_code == 200
    for thread in threads:
        thread.join()


def test_the_load_is_given_as_shares_of_the_pool(server: LiveServer) -> None:
    load = LoadMsg(
        num_running=2,
        num_waiting=1,
        used_slots=100,
        cached_slots=0,
        promised_slots=300,
        requested_slots=500,
        max_total_token_num=400,
    )
    server.call(lambda: server.engine.on_load(load))
    expected = {"current_load": 0.25, "logical_max_load": 1.25, "dynamic_max_load": 0.75}
    assert server.client.get("/token_load").json() == expected


def test_server_info_tells_limits(server: LiveServer) -> None:
    info = server.client.get("/get_server_info").json()
    assert (info["max_req_total_len"], info["max_total_token_num"]) == (512, 4096)
    assert "api_key" not in info


def test_tokens_are_counted(server: LiveServer) -> None:
    body = {"text": "héllo", "parameters": {"max_new_tokens": 1}}
    assert server.client.post("/tokens", json=body).json() == {"ntokens": 6}


def test_tokenize_and_detokenize_are_inverse(server: LiveServer) -> None:
    reply = server.client.post("/tokenize", json={"prompt": "héllo"}).json()
    assert (reply["count"], reply["max_model_len"]) == (6, 512)
    assert server.client.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "héllo"}


def test_a_conversation_is_tokenized_as_a_chat_request_would(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    count = server.client.post("/tokenize", json={"messages": messages}).json()["count"]
    usage = server.client.post("/v1/chat/completions", json={"messages": messages}).json()["usage"]
    assert usage["prompt_tokens"] == count


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"prompt": None}, {"text": "a"}])
def test_tokenize_wants_one_thing(server: LiveServer, body: dict[str, object]) -> None:
    assert server.client.post("/tokenize", json=body).status_code == 400


@pytest.mark.parametrize("tokens", [[-1], [258], [2**40], ["a"], [1.0]])
def test_detokenize_wants_ids_of_the_vocabulary(server: LiveServer, tokens: list[object]) -> None:
    assert server.client.post("/detokenize", json={"tokens": tokens}).status_code == 400


def test_a_bug_is_a_500_in_the_shape_of_all_errors(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str, param: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server.front.prompts, "encode_text", fail)
    response = server.client.post("/tokens", json={"text": "a"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"


def test_the_schema_describes_the_body_of_every_post(server: LiveServer) -> None:
    schema = server.client.get("/openapi.json").json()
    posts = {path: methods["post"] for path, methods in schema["paths"].items() if "post" in methods}
    assert {endpoint.path for endpoint in ENDPOINTS} < set(posts)
    for post in posts.values():
        reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.removeprefix("#/components/schemas/") in schema["components"]["schemas"]
