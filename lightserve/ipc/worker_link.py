"""The link between the router and a model worker: rpyc over a unix socket, for one call after the other.

rpyc's own streams ask before each read whether there is something to read, and copy all that is left after each 64 KB
written; its channel compresses what is longer than 3,000 bytes. Between two processes of one machine that only costs
time, of which a step has little.
"""

import socket
from typing import Any

import rpyc
from rpyc.core.channel import Channel
from rpyc.core.service import VoidService
from rpyc.core.stream import SocketStream
from rpyc.utils.factory import connect_channel

from lightserve.ipc.links import Outbox
from lightserve.ipc.messages import ReadyMsg

_BUFFER_BYTES = 1 << 16
# Plain bytes both ways, and a step takes as long as it takes. An operator's mistake that a worker finds must arrive as
# what it is.
_CONFIG = {
    "allow_pickle": False,
    "allow_public_attrs": False,
    "sync_request_timeout": None,
    "instantiate_custom_exceptions": True,
}


class _LocalStream(SocketStream):  # type: ignore[misc]  # rpyc has no types
    """Reads a blocking socket through a buffer: mostly a whole message at once."""

    __slots__ = ("_buffer",)

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._buffer = bytearray()

    def poll(self, timeout: Any) -> bool:
        return True  # whoever asks waits for ever, and so does read

    def read(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._buffer += self._receive()
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def write(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except OSError as error:
            self.close()
            raise EOFError(f"the connection broke: {error}") from error

    def _receive(self) -> bytes:
        try:
            received: bytes = self.sock.recv(_BUFFER_BYTES)
        except OSError as error:
            self.close()
            raise EOFError(f"the connection broke: {error}") from error
        if not received:
            self.close()
            raise EOFError("the peer has closed the connection")
        return received


def _connect(sock: socket.socket, service: Any) -> "rpyc.Connection":
    return connect_channel(Channel(_LocalStream(sock), compress=False), service, _CONFIG)


class WorkerListener:
    """A worker's end: takes calls from one router.

    Args:
        path: Of the socket; connections are accepted from now on.
    """

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(1)

    def serve(self, service: rpyc.Service) -> None:
        """Serve the router until it leaves."""
        sock, _ = self._listener.accept()
        self._listener.close()
        _connect(sock, service).serve_all()


def serve_worker(run_dir: str, name: str, service: rpyc.Service) -> None:
    """Tell the launcher that a worker is ready, and serve the router until it leaves.

    Args:
        run_dir: The server's run directory.
        name: The worker's process.
        service: Its methods.
    """
    listener, launcher = WorkerListener(f"{run_dir}/{name}"), Outbox(run_dir, "launcher")
    launcher.send(ReadyMsg(name))
    listener.serve(service)
    launcher.close()


def connect_worker(path: str) -> "rpyc.Connection":
    """Connect to a worker's socket.

    Raises:
        OSError: No worker listens there, or not yet.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return _connect(sock, VoidService)
