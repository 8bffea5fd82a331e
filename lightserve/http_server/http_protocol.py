"""HTTP/1.1 for uvicorn, with the bounds that it and httptools lack: on a client's time, and on what is no body."""

import re
import socket
import sys
from asyncio import TimerHandle, Transport

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from lightserve.errors import RequestError
from lightserve.http_server.error_reply import error_reply
from lightserve.http_server.limits import LOST_CLIENT_S, MAX_HEAD_BYTES, MAX_PIPELINED, REQUEST_TIMEOUT_S

PART_WRITER = "lightserve.part_writer"

_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class PartWriter:
    """Writes parts of a chunked reply as ``send`` does, but without a coroutine: most tokens need not wait.

    It is the ``writer`` of a scope's extension ``PART_WRITER``.

    Args:
        transport: Of the connection, on which the reply's head has been written before the first part.
        flow: Knows whether the client keeps up.
    """

    def __init__(self, transport: Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    @property
    def is_ready(self) -> bool:
        """Whether the client is there and reads; if not, ``send`` knows what to do."""
        return not (self._flow.write_paused or self._transport.is_closing())

    def write(self, part: bytes) -> None:
        """Write a part that is not empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection.

    * A request must have come whole within ``REQUEST_TIMEOUT_S``: 408, and the connection closes.
    * Head, trailers and whatever else is no body: at most ``MAX_HEAD_BYTES``, give or take a read, or 400 and close.
    * Requests may be pipelined, up to ``MAX_PIPELINED`` small ones; whoever does so and leaves is noticed at once.
    * A wish for another protocol is ignored.
    """

    _deadline: TimerHandle | None = None
    _answered: RequestResponseCycle | None = None  # uvicorn's own ``cycle`` is the last one of a pipeline
    _expects_head = True
    _made_progress = False
    _overhead_bytes = 0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override] # as in uvicorn
        """Wait for the first request."""
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever answers that nobody reads any more."""
        super().connection_lost(exc)
        self._stop_clock()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        self._made_progress = False
        super().data_received(_without_upgrade(data) if self._expects_head else data)
        self._overhead_bytes = 0 if self._made_progress else self._overhead_bytes + len(data)
        if self.transport.is_closing():
            return
        if self._overhead_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The request's headers are too large.")
        elif self.pipeline:
            self._read_on()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._start_clock()

    def on_headers_complete(self) -> None:
        """A body begins, if there is one."""
        self._expects_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take in a piece of the body."""
        self._made_progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has come whole."""
        self._made_progress = self._expects_head = True
        self._stop_clock()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the shape of all errors, and close."""
        self._refuse(RequestError(msg))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        cycle.scope["extensions"] = {PART_WRITER: {"writer": PartWriter(cycle.transport, cycle.flow)}}
        super()._start_asgi_task(cycle, app)

    def _read_on(self) -> None:
        """Undo uvicorn's pause behind a request that is being answered, or its client could leave unnoticed."""
        if len(self.pipeline) > MAX_PIPELINED or len(self.cycle.body) > MAX_HEAD_BYTES:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def _start_clock(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self._time_out)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _time_out(self) -> None:
        if self.scope is None:
            self.transport.close()  # nothing has come: there is nothing to answer
        else:
            self._refuse(RequestError("The request took too long to come.", status=408, code="request_timeout"))

    def _refuse(self, error: RequestError) -> None:
        last = self._answered
        if last is not None and last.response_started and not (last.response_complete and self._expects_head):
            self.transport.abort()  # amid a reply, or this request was answered before it had come whole
            return
        reply = error_reply(error, {"Connection": "close"})
        headers = (name + b": " + value + b"\r\n" for name, value in reply.raw_headers)
        self.transport.write(b"".join([STATUS_LINE[error.status], *headers, b"\r\n", bytes(reply.body)]))
        self.transport.close()


def notice_lost_clients(listener: socket.socket) -> None:
    """End connections of this listener whose client's machine is gone or takes nothing for ``LOST_CLIENT_S``."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_CLIENT_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_CLIENT_S)


def _without_upgrade(data: bytes) -> bytes:
    """Rename the header ``Upgrade``: httptools would take the body for bytes of the other protocol.

    Java's HTTP client asks so for HTTP/2 in every first request.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nignored:", head) + end + rest
