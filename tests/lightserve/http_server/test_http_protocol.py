"""Connections, byte by byte: slow clients, endless ones, impatient ones, and those that vanish."""

import errno
import json
import socket
import time
from collections.abc import Iterator

import pytest

from lightserve.http_server.http_protocol import notice_lost_clients
from lightserve.http_server.limits import MAX_HEAD_BYTES
from tests.lightserve.http_server.endpoints import ENDPOINTS, Endpoint
from tests.lightserve.http_server.fake_engine import Script
from tests.lightserve.http_server.live_server import LiveServer
from tests.lightserve.http_server.raw_client import connect, head, read_all, request, send_until_closed

CLOSE = "connection: close"
CHUNKED = head("/generate", "transfer-encoding: chunked")
HI = request("/generate", {"inputs": "hi"})
LAST_HI = request("/generate", {"inputs": "hi"}, CLOSE)
SLOW = Script("x" * 400, step_s=0.02)


@pytest.fixture
def connection(server: LiveServer) -> Iterator[socket.socket]:
    with connect(server) as connection:
        yield connection


@pytest.fixture
def impatient_server(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    monkeypatch.setattr("lightserve.http_server.http_protocol.REQUEST_TIMEOUT_S", 0.3)
    return server


def error_of(reply: bytes) -> tuple[bytes, str]:
    """Status line and error code of a reply."""
    top, _, body = reply.partition(b"\r\n\r\n")
    return top.split(b"\r\n")[0], json.loads(body)["error"]["code"]


@pytest.mark.parametrize("sent", [b"GET /health HT", CHUNKED[:-2], CHUNKED, CHUNKED + b"1\r\n{\r\n", HI[:-3]])
def test_a_request_that_stops_halfway_times_out(impatient_server: LiveServer, sent: bytes) -> None:
    with connect(impatient_server) as connection:
        connection.sendall(sent)
        assert error_of(read_all(connection)) == (b"HTTP/1.1 408 Request Timeout", "request_timeout")
    assert not impatient_server.engine.requests


def test_a_later_request_that_stops_halfway_times_out_too(impatient_server: LiveServer) -> None:
    with connect(impatient_server) as connection:
        connection.sendall(head("/liveness", method="GET"))
        connection.recv(65536)
        connection.sendall(HI[:-3])
        assert error_of(read_all(connection))[1] == "request_timeout"


def test_a_body_that_trickles_in_times_out(impatient_server: LiveServer) -> None:
    with connect(impatient_server) as connection:
        connection.sendall(head("/generate", "content-length: 1000"))
        for _ in range(20):
            try:
                connection.sendall(b" ")
            except ConnectionError:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the server kept the connection")


def test_a_connection_on_which_nothing_comes_is_closed(impatient_server: LiveServer) -> None:
    with connect(impatient_server) as connection:
        assert read_all(connection) == b""


def test_a_whole_request_may_be_answered_as_slowly_as_it_takes(impatient_server: LiveServer) -> None:
    impatient_server.engine.script_for = lambda message: Script("abc", step_s=0.3)
    assert ENDPOINTS[0].ask(impatient_server.client).text == "abc"


def test_a_body_still_coming_after_its_refusal_times_out_without_a_second_reply(impatient_server: LiveServer) -> None:
    with connect(impatient_server) as connection:
        connection.sendall(head("/nope", "content-length: 1000"))
        reply = read_all(connection)
    assert reply.count(b"HTTP/1.1") == 1
    assert error_of(reply)[1] == "not_found"


@pytest.mark.parametrize(
    "start",
    [
        b"GET /health HTTP/1.1\r\nx: ",
        b"GET /",
        CHUNKED + b"1\r\n{\r\n0\r\na: ",
        CHUNKED + b"1;",
        b"\r\n",
    ],
    ids=["header", "url", "trailer", "chunk-extension", "nothing"],
)
@pytest.mark.parametrize("part", [b"a" * 65536, b"a: b\r\n" * 10_000], ids=["one", "many"])
def test_what_is_no_body_is_bounded(server: LiveServer, connection: socket.socket, start: bytes, part: bytes) -> None:
    connection.sendall(start)
    sent = send_until_closed(connection, part, 100 * MAX_HEAD_BYTES)
    assert sent < 100 * MAX_HEAD_BYTES
    assert server.client.get("/health").status_code == 200


def test_a_large_body_is_no_large_head(server: LiveServer) -> None:
    for _ in range(2):
        body = json.dumps({"text": "a" * 60_000, "parameters": {"x": "y" * 1_000_000}})
        assert server.client.post("/tokens", content=body).json() == {"ntokens": 60_000}


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"],
)
def test_what_is_no_http_is_a_400_in_the_shape_of_all_errors(connection: socket.socket, garbage: bytes) -> None:
    connection.sendall(garbage)
    assert error_of(read_all(connection)) == (b"HTTP/1.1 400 Bad Request", "invalid_request")


def test_garbage_after_a_complete_exchange_is_a_400(connection: socket.socket) -> None:
    connection.sendall(head("/liveness", method="GET"))
    connection.recv(65536)
    connection.sendall(b"\x16\x03\x01\r\n\r\n")
    assert error_of(read_all(connection))[1] == "invalid_request"


def test_garbage_amid_a_stream_adds_nothing_to_it(server: LiveServer, connection: socket.socket) -> None:
    server.engine.script_for = lambda message: SLOW
    connection.sendall(request("/generate_stream", {"inputs": "hi"}))
    begun = connection.recv(65536)
    connection.sendall(b"\x16\x03\x01\r\n\r\n")
    assert (begun + read_all(connection)).count(b"HTTP/1.1") == 1


def test_pipelined_requests_are_answered_in_order(connection: socket.socket) -> None:
    connection.sendall(HI + head("/liveness", method="GET") + LAST_HI)
    replies = read_all(connection).split(b"HTTP/1.1 200 OK")[1:]
    assert [b"Hello" in reply for reply in replies] == [True, False, True]


def unchunked(reply: bytes) -> bytes:
    """The body of a chunked reply, behind which there is nothing."""
    _, _, rest = reply.partition(b"\r\n\r\n")
    body = b""
    while (size := int(rest.partition(b"\r\n")[0], 16)) > 0:
        _, _, rest = rest.partition(b"\r\n")
        assert rest[size:].startswith(b"\r\n")
        body, rest = body + rest[:size], rest[size + 2 :]
    assert rest == b"0\r\n\r\n"
    return body


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
def test_streams_follow_one_another_on_one_connection(
    server: LiveServer, connection: socket.socket, pause_s: float
) -> None:
    server.engine.script_for = lambda message: Script("Hello", step_s=0.01)
    connection.sendall(request("/generate_stream", {"inputs": "hi"}))
    time.sleep(pause_s)
    connection.sendall(request("/generate_stream", {"inputs": "hi"}, CLOSE))
    replies = read_all(connection).split(b"HTTP/1.1 200 OK")[1:]
    events = [unchunked(reply).split(b"\n\n")[:-1] for reply in replies]
    texts = ["".join(json.loads(event.removeprefix(b"data:"))["token"]["text"] for event in each) for each in events]
    assert texts == ["Hello", "Hello"]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
@pytest.mark.parametrize("delay_s", [0.0, 0.1])
def test_a_client_that_pipelines_and_leaves_is_noticed(server: LiveServer, endpoint: Endpoint, delay_s: float) -> None:
    server.engine.script_for = lambda message: SLOW
    with connect(server) as connection:
        connection.sendall(request(endpoint.path, endpoint.body()))
        time.sleep(delay_s)
        connection.sendall(request(endpoint.path, endpoint.body()))
        server.until(lambda: bool(server.engine.requests))
        time.sleep(0.1)
    server.until(lambda: bool(server.engine.aborts), 1)
    assert len(server.engine.requests) == 1


@pytest.mark.parametrize("part", [head("/liveness", method="GET"), request("/tokens", {"text": "a" * 10_000})])
def test_a_flood_of_pipelined_requests_closes_the_connection(
    server: LiveServer, connection: socket.socket, part: bytes
) -> None:
    server.engine.script_for = lambda message: SLOW
    connection.sendall(HI)
    assert send_until_closed(connection, part, 10**8) < 10**8
    server.until(lambda: bool(server.engine.aborts), 1)


def test_many_pipelined_requests_are_answered_where_the_first_is_not_slow(connection: socket.socket) -> None:
    connection.sendall(b"".join([head("/liveness", method="GET")] * 50 + [LAST_HI]))
    assert read_all(connection).count(b"HTTP/1.1 200 OK") == 51


@pytest.mark.parametrize("name", ["Upgrade", "upgrade"])
def test_a_wish_for_another_protocol_is_ignored(connection: socket.socket, name: str) -> None:
    wish = ["connection: Upgrade, HTTP2-Settings", f"{name}: h2c", "http2-settings: AAMAAABkAAQCAAAAAAIAAAAA"]
    connection.sendall(request("/generate", {"inputs": "hi"}, *wish) + LAST_HI)
    assert read_all(connection).count(b"Hello") == 2


def test_the_body_is_never_taken_for_a_header(connection: socket.socket) -> None:
    body = b"{\r\nupgrade: 1}"
    connection.sendall(head("/generate", CLOSE, f"content-length: {len(body)}") + body)
    assert error_of(read_all(connection))[1] == "invalid_json"


def test_a_connection_ends_when_its_client_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightserve.http_server.http_protocol.LOST_CLIENT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        notice_lost_clients(listener)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        server_end, _ = listener.accept()
        with server_end, pytest.raises(OSError, match="timed out") as ended:
            server_end.sendall(bytes(2**26))
        assert ended.value.errno == errno.ETIMEDOUT
