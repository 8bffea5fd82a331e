"""Bodies beyond all bounds: refused early, and nothing else waits for them."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from lightserve.http_server.limits import (
    LARGE_BODY_BYTES,
    MAX_BODY_BYTES,
    MAX_BODY_CONTAINERS,
    MIN_DETOKENIZED_IDS,
    MIN_PROMPT_CHARS,
)
from lightserve.tokenizer import Tokenizer
from tests.lightserve.http_server.endpoints import ENDPOINTS, Endpoint
from tests.lightserve.http_server.live_server import LiveServer
from tests.lightserve.http_server.raw_client import connect, head, read_all, send_until_closed

TOO_LARGE = 64 * 1024 * 1024


@pytest.fixture
def connection(server: LiveServer) -> Iterator[socket.socket]:
    with connect(server) as connection:
        yield connection


def test_a_declared_large_body_is_refused_before_it_is_sent(connection: socket.socket) -> None:
    connection.sendall(head("/generate", f"content-length: {TOO_LARGE}"))
    assert read_all(connection).startswith(b"HTTP/1.1 413 ")


def test_a_chunked_large_body_is_refused_while_it_is_sent(connection: socket.socket) -> None:
    connection.sendall(head("/generate", "transfer-encoding: chunked"))
    sent = send_until_closed(connection, b"10000\r\n" + b" " * 65536 + b"\r\n", TOO_LARGE)
    assert MAX_BODY_BYTES <= sent < TOO_LARGE


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
def test_a_text_far_beyond_the_context_is_not_tokenized(server: LiveServer, endpoint: Endpoint) -> None:
    reply = endpoint.ask(server.client, "a" * (MIN_PROMPT_CHARS + 1))
    assert reply.status == 400
    assert reply.error is not None
    assert reply.error["code"] == "context_length_exceeded"
    assert "characters" in reply.error["message"]  # which are counted where tokens are not


def test_health_answers_while_large_bodies_come(server: LiveServer) -> None:
    body = json.dumps({"inputs": "a" * (MAX_BODY_BYTES - 100)})
    statuses: list[int] = []

    def send() -> None:
        statuses.append(server.client.post("/generate", content=body).status_code)

    senders = [threading.Thread(target=send) for _ in range(4)]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        assert server.client.get("/health", timeout=5).status_code == 200
    for sender in senders:
        sender.join()
    assert statuses == [400] * 4


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
def test_health_answers_while_a_text_is_tokenized(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, body: dict[str, object]
) -> None:
    started, answered = threading.Event(), threading.Event()

    def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        started.set()
        return [1] if answered.wait(10) else []

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with ThreadPoolExecutor(1) as threads:
        tokenized = threads.submit(server.client.post, "/tokenize", json=body)
        assert started.wait(10)
        assert server.client.get("/health").status_code == 200
        answered.set()
        assert tokenized.result().json()["tokens"] == [1]


def test_a_client_that_hangs_up_amid_its_body_disturbs_nobody(server: LiveServer, connection: socket.socket) -> None:
    connection.sendall(head("/generate", "content-length: 1000") + b'{"inputs": "a')
    connection.close()
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize("opening", [b"{}", b"[]"])
def test_a_body_of_nothing_but_containers_is_refused_before_it_is_built(server: LiveServer, opening: bytes) -> None:
    body = b'{"messages":[{"role":"user","content":"a","x":[%s]}]}' % b",".join([opening] * MAX_BODY_CONTAINERS)
    response = server.client.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert str(MAX_BODY_CONTAINERS) in response.json()["error"]["message"]


def test_no_more_ids_than_a_context_holds_are_detokenized(server: LiveServer) -> None:
    response = server.client.post("/detokenize", json={"tokens": [1] * (MIN_DETOKENIZED_IDS + 1)})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"


@pytest.mark.parametrize("value", ["[1e999]", "[" * 50 + "]" * 50, '{"a": {"b": [1, 2]}}'])
def test_a_field_that_is_not_read_may_hold_anything_and_an_unsupported_one_is_refused(
    server: LiveServer, value: str
) -> None:
    for field, status in (("metadata", 200), ("logit_bias", 400)):
        body = f'{{"prompt": "hi", "{field}": {value}}}'
        assert server.client.post("/v1/completions", content=body).status_code == status


def test_large_bodies_are_bounded_together_and_small_ones_pass(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.http_server.body.MAX_OPEN_BODY_BYTES", 4 * LARGE_BODY_BYTES)
    with ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(connect(server))
            connection.sendall(head("/tokens", f"content-length: {2 * LARGE_BODY_BYTES}") + b" " * LARGE_BODY_BYTES)
        large = json.dumps({"text": "a", "parameters": "x" * (2 * LARGE_BODY_BYTES)})
        server.until(lambda: server.client.post("/tokens", content=large).status_code == 503)
        assert server.client.post("/tokens", json={"text": "a"}).status_code == 200
    server.until(lambda: server.client.post("/tokens", content=large).status_code == 200)
