"""Clients that leave, clients that wait, clients that do not read."""

import asyncio
import json
import logging
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from lightserve.ipc.messages import GenerateMsg, TextEvent, pack_float32, pack_int32
from tests.lightserve.http_server.endpoints import ENDPOINTS, Endpoint
from tests.lightserve.http_server.fake_engine import Script
from tests.lightserve.http_server.live_server import LiveServer
from tests.lightserve.http_server.raw_client import connect, request

STREAMED = [endpoint for endpoint in ENDPOINTS if endpoint.streamed]
WHOLE = [endpoint for endpoint in ENDPOINTS if not endpoint.streamed]


def endless(message: GenerateMsg) -> Script:
    return Script("x" * 400, step_s=0.02)


def leave_after(server: LiveServer, endpoint: Endpoint, num_events: int, **parameters: Any) -> None:
    body = endpoint.body(**parameters)
    with server.client.stream("POST", endpoint.path, json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        for _ in range(num_events):
            next(lines)


def aborted_ids(server: LiveServer) -> list[int]:
    return sorted(req_id for message in server.engine.aborts for req_id in message.req_ids)


@pytest.mark.parametrize("endpoint", STREAMED, ids=str)
def test_a_stream_whose_client_leaves_is_aborted_once(server: LiveServer, endpoint: Endpoint) -> None:
    server.engine.script_for = endless
    leave_after(server, endpoint, 3)
    server.until_idle()
    assert aborted_ids(server) == [server.engine.requests[0].req_id]


@pytest.mark.parametrize("endpoint", WHOLE, ids=str)
def test_a_whole_reply_whose_client_leaves_is_aborted_once(server: LiveServer, endpoint: Endpoint) -> None:
    server.engine.script_for = endless
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(endpoint.path, json=endpoint.body(), timeout=0.3)
    server.until_idle()
    assert aborted_ids(server) == [server.engine.requests[0].req_id]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
def test_a_client_that_leaves_before_the_first_token_is_aborted(server: LiveServer, endpoint: Endpoint) -> None:
    server.engine.script_for = lambda message: Script(silent_after=0)
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(endpoint.path, json=endpoint.body(), timeout=0.3)
    server.until_idle()
    assert aborted_ids(server) == [server.engine.requests[0].req_id]


def test_every_choice_that_still_runs_is_aborted(server: LiveServer) -> None:
    lengths = iter([1, 400, 400])
    server.engine.script_for = lambda message: Script("x" * next(lengths), step_s=0.02)
    leave_after(server, Endpoint("/v1/chat/completions", streamed=True), 12, n=3)
    server.until_idle()
    assert aborted_ids(server) == [message.req_id for message in server.engine.requests[1:]]


def test_late_events_of_a_client_that_left_are_dropped_quietly(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.script_for = lambda message: Script("x" * 300, step_s=0.001, deaf=True)
    with caplog.at_level(logging.DEBUG, logger="lightserve"):
        leave_after(server, Endpoint("/generate_stream", streamed=True), 3)
        server.until_idle()
    assert len(server.engine.aborts) == 1
    assert len(caplog.records) <= 2


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
@pytest.mark.parametrize("resets", [False, True])
def test_clients_that_vanish_at_any_stage_leave_nothing(server: LiveServer, endpoint: Endpoint, resets: bool) -> None:
    server.engine.script_for = endless
    whole = request(endpoint.path, endpoint.body())
    for num_bytes in range(0, len(whole) + 1, len(whole) // 8):
        with connect(server) as connection:
            connection.sendall(whole[:num_bytes])
            if resets:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with connect(server) as connection:
        connection.sendall(whole)
        server.until(lambda: server.engine.num_running > 0)
    server.until_idle()
    assert aborted_ids(server) == sorted(message.req_id for message in server.engine.requests)


@pytest.mark.parametrize("endpoint", STREAMED, ids=str)
def test_a_stream_whose_client_stays_but_reads_nothing_is_given_up(server: LiveServer, endpoint: Endpoint) -> None:
    server.engine.script_for = lambda message: Script(silent_after=1)
    with connect(server) as connection:
        connection.sendall(request(endpoint.path, endpoint.body()))
        connection.recv(4)  # the reply has begun
        req_id = server.engine.requests[0].req_id
        # A mebibyte at a time: the kernel takes several before the server notices that nobody reads.
        event = TextEvent(req_id, "x" * 2**20, pack_int32([7] * 4096), pack_float32([0.0] * 4096))

        def is_given_up() -> bool:
            server.call(lambda: server.front.streams.deliver([event]))
            return bool(server.engine.aborts)

        server.until(is_given_up, 10)
    server.until_idle()
    assert aborted_ids(server) == [req_id]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
def test_a_complete_answer_is_never_aborted(server: LiveServer, endpoint: Endpoint) -> None:
    assert endpoint.ask(server.client, n=1).text == "Hello"
    server.until_idle()
    assert not server.engine.aborts


def test_patient_clients_are_never_taken_for_gone(server: LiveServer) -> None:
    server.engine.script_for = lambda message: Script("x", step_s=1.0)
    body = json.dumps(Endpoint("/generate_stream", streamed=True).body(max_tokens=1)).encode()
    head = b"POST /generate_stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    address = urlsplit(server.url)

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(head + body)
        reply = await reader.read()
        writer.close()
        return reply

    async def ask_all() -> list[bytes]:
        return await asyncio.gather(*(ask() for _ in range(300)))

    assert all(b'"finish_reason":"length"' in reply for reply in asyncio.run(ask_all()))
    assert not server.engine.aborts
