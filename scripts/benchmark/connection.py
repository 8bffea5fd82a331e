"""A kept HTTP/1.1 connection: one request at a time, its response handed on as it comes."""

import asyncio
import time
from typing import Protocol, cast

import httptools

from benchmark.endpoint import Endpoint

# Servers close idle connections after a few seconds (uvicorn: 5); a request must not meet that moment.
_IDLE_LIMIT_S = 1.0


class ResponseSink(Protocol):
    """Takes one response."""

    def on_status(self, status: int) -> None:
        """Take the status; the headers are complete."""

    def on_body(self, chunk: bytes, read_at_s: float) -> None:
        """Take a part of the body and the moment (``time.monotonic``) of the read that brought it."""

    def on_end(self) -> None:
        """The response is complete."""

    def on_lost(self, reason: str) -> None:
        """The connection ended before the response did."""


class Connection(asyncio.Protocol):
    """Sends a request and feeds its response to the request's sink.

    Its callbacks are those of ``asyncio.Protocol``, then those of ``httptools.HttpResponseParser``.
    """

    def __init__(self, pool: "ConnectionPool") -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._sink: ResponseSink | None = None
        self._read_at_s = 0.0
        self.idle_since_s = 0.0

    def send(self, request: bytes, sink: ResponseSink) -> None:
        """Write a whole request; its response goes to ``sink``."""
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        if self._transport is None:
            self._lose("closed before the request was sent")
        else:
            self._transport.write(request)

    def abort(self) -> None:
        """Close at once; the sink hears nothing more."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:  # noqa: D102
        if self._parser is None:
            self.abort()
            return
        self._read_at_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # ours, not the server's
        except httptools.HttpParserError as error:
            self._lose(f"not HTTP: {error}")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self._transport = None
        self._pool.forget(self)
        self._lose(str(exc) if exc is not None else "closed by the server")

    def on_headers_complete(self) -> None:  # noqa: D102
        if self._sink is not None and self._parser is not None:
            self._sink.on_status(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:  # noqa: D102
        if self._sink is not None:
            self._sink.on_body(body, self._read_at_s)

    def on_message_complete(self) -> None:  # noqa: D102
        sink, parser = self._sink, self._parser
        self._sink = self._parser = None
        if sink is not None:
            sink.on_end()
        if parser is not None and parser.should_keep_alive():
            self._pool.give(self)
        elif self._transport is not None:
            self._transport.close()

    def _lose(self, reason: str) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_lost(reason)


class ConnectionPool:
    """Opens connections to one server and keeps the idle ones for a moment."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._ssl = endpoint.ssl_context()
        self._idle: list[Connection] = []

    async def take(self) -> Connection:
        """Return a connection that nobody else uses: the one idle for the shortest time, or a new one.

        Raises:
            OSError: The server does not accept one.
        """
        if self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.idle_since_s < _IDLE_LIMIT_S:
                return connection
            connection.abort()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self), self._endpoint.host, self._endpoint.port, ssl=self._ssl
        )
        return connection

    def give(self, connection: Connection) -> None:
        """Take back a connection whose response is complete."""
        connection.idle_since_s = time.monotonic()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Drop a connection that was closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().abort()
