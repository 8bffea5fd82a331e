"""Bodies and heads beyond all bounds: refused early, and nothing else waits for them."""

import json
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from lightserve.http_server.limits import MAX_BODY_BYTES, MAX_HEAD_BYTES, MIN_PROMPT_CHARS
from tests.lightserve.http_server.endpoints import ENDPOINTS, Endpoint
from tests.lightserve.http_server.live_server import LiveServer

TOO_LARGE = 64 * 1024 * 1024


@pytest.fixture
def connection(server: LiveServer) -> Iterator[socket.socket]:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes; a reset after its last byte is a close too."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def test_a_declared_large_body_is_refused_before_it_is_sent(connection: socket.socket) -> None:
    connection.sendall(f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {TOO_LARGE}\r\n\r\n".encode())
    assert read_all(connection).startswith(b"HTTP/1.1 413 ")


def test_a_chunked_large_body_is_refused_while_it_is_sent(connection: socket.socket) -> None:
    connection.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
    sent = 0
    try:
        while sent < TOO_LARGE:
            connection.sendall(piece)
            sent += 65536
    except (ConnectionError, TimeoutError):
        pass
    assert MAX_BODY_BYTES <= sent < TOO_LARGE


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
def test_a_text_far_beyond_the_context_is_not_tokenized(server: LiveServer, endpoint: Endpoint) -> None:
    reply = endpoint.ask(server.client, "a" * (MIN_PROMPT_CHARS + 1))
    assert reply.status == 400
    assert reply.error is not None
    assert reply.error["code"] == "context_length_exceeded"
    assert str(MIN_PROMPT_CHARS + 1) in reply.error["message"] or endpoint.is_chat


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


def test_a_client_that_hangs_up_amid_its_body_disturbs_nobody(server: LiveServer, connection: socket.socket) -> None:
    connection.sendall(b'POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"inputs": "a')
    connection.close()
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize("head", [b"GET /health HTTP/1.1\r\nx: ", b"GET /"])
def test_an_endless_head_closes_the_connection(connection: socket.socket, head: bytes) -> None:
    connection.sendall(head)
    sent = 0
    try:
        while sent < 16 * MAX_HEAD_BYTES:
            connection.sendall(b"a" * 65536)
            sent += 65536
    except ConnectionError:
        pass
    assert sent < 16 * MAX_HEAD_BYTES or read_all(connection).startswith(b"HTTP/1.1 400")


def test_a_large_body_after_a_small_head_is_no_large_head(server: LiveServer) -> None:
    for _ in range(2):
        body = json.dumps({"text": "a" * 60_000, "parameters": {"x": "y" * 1_000_000}})
        assert server.client.post("/tokens", content=body).json() == {"ntokens": 60_000}
