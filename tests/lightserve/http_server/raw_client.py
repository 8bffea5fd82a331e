"""HTTP by the byte, for clients that no library would be."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

from tests.lightserve.http_server.live_server import LiveServer


def connect(server: LiveServer) -> socket.socket:
    """Open a connection to a server under test."""
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=10)


def head(path: str, *fields: str, method: str = "POST") -> bytes:
    """Write a request's line and header fields."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *fields, "", ""]).encode()


def request(path: str, body: Any, *fields: str) -> bytes:
    """Write a whole request; ``body`` goes as JSON."""
    raw = json.dumps(body).encode()
    return head(path, f"content-length: {len(raw)}", *fields) + raw


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes; a reset after its last byte is a close too."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def send_until_closed(connection: socket.socket, part: bytes, limit: int) -> int:
    """Send ``part`` again and again until the server closes or ``limit`` bytes are out; return how many were sent."""
    sent = 0
    try:
        while sent < limit:
            connection.sendall(part)
            sent += len(part)
    except ConnectionError:
        pass
    return sent
