"""Links between processes: one inbox each (ZeroMQ PULL, bound), others push to it. Nothing is dropped or reordered.

The high-water mark is off on both sides: a send never blocks and never drops, also before the peer is there. What
bounds the memory is admission, not the link. A socket belongs to one thread.
"""

import logging
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

logger = logging.getLogger(__name__)

Msg = TypeVar("Msg")

# How long the end of a process waits for its last messages to leave, when the peer is gone as well.
_LINGER_MS = 500


def address(run_dir: str, name: str) -> str:
    """Where the process ``name`` of the server in ``run_dir`` receives."""
    return f"ipc://{run_dir}/{name}"


class _Decoder(Generic[Msg]):
    def __init__(self, name: str, union_type: Any) -> None:
        self._name = name
        self._decoder: msgspec.msgpack.Decoder[Msg] = msgspec.msgpack.Decoder(union_type)

    def decode(self, raw: bytes) -> Msg | None:
        try:
            return self._decoder.decode(raw)
        except msgspec.DecodeError as error:
            logger.error("inbox %s: skipped a message of %d bytes: %s", self._name, len(raw), error)
            return None


class Inbox(Generic[Msg]):
    """What a process receives.

    Args:
        run_dir: The server's run directory.
        name: This process's name.
        union_type: Union of the messages that may arrive, such as ``RouterInbox``. A message that is none of them is
            logged and skipped.
    """

    def __init__(self, run_dir: str, name: str, union_type: Any) -> None:
        self.socket = _bind(zmq.Context.instance(), run_dir, name)
        self._decoder: _Decoder[Msg] = _Decoder(name, union_type)

    def receive(self, timeout_s: float | None = None) -> Msg | None:
        """Wait for one message; None when ``timeout_s``, whole milliseconds of it, passed without one.

        0: do not wait; None: for ever.
        """
        while timeout_s is None or self.socket.poll(int(timeout_s * 1000)):
            message = self._decoder.decode(self.socket.recv())
            if message is not None:
                return message
        return None

    def drain(self) -> list[Msg]:
        """Receive all that has arrived, in order, without waiting."""
        return _drain(self.socket, self._decoder)

    def close(self) -> None:
        """Stop receiving."""
        self.socket.close()


class AsyncInbox(Generic[Msg]):
    """An ``Inbox`` for asyncio (uvloop included). Make it inside the running loop."""

    def __init__(self, run_dir: str, name: str, union_type: Any) -> None:
        self.socket = _bind(zmq.asyncio.Context.instance(), run_dir, name)
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self.socket.underlying)
        self._decoder: _Decoder[Msg] = _Decoder(name, union_type)

    async def receive(self) -> Msg:
        """Wait for one message."""
        while True:
            message = self._decoder.decode(await self.socket.recv())
            if message is not None:
                return message

    def drain(self) -> list[Msg]:
        """Receive all that has arrived, in order, without waiting."""
        return _drain(self._plain, self._decoder)

    def close(self) -> None:
        """Stop receiving."""
        self.socket.close()


class Outbox:
    """Where a process sends to another one's inbox. Never blocks; messages wait until the peer is there.

    Args:
        run_dir: The server's run directory.
        name: The receiving process's name.
        context: Unset: the process's own.
    """

    def __init__(self, run_dir: str, name: str, context: "zmq.Context[zmq.Socket[bytes]] | None" = None) -> None:
        self.socket = (context or zmq.Context.instance()).socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self.socket.connect(address(run_dir, name))
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message."""
        self.socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Let go of the link once what was sent has left, or after half a second."""
        self.socket.close()


def _bind(context: Any, run_dir: str, name: str) -> Any:
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address(run_dir, name))
    return socket


def _drain(socket: "zmq.Socket[bytes]", decoder: _Decoder[Msg]) -> list[Msg]:
    messages: list[Msg] = []
    while True:
        try:
            raw = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return messages
        message = decoder.decode(raw)
        if message is not None:
            messages.append(message)
