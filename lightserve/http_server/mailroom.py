"""What arrives in the HTTP server's inbox, and what follows from it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Protocol

from lightserve.http_server.front_end import FrontEnd
from lightserve.http_server.status import Phase
from lightserve.ipc.messages import (
    DownMsg,
    DrainMsg,
    ErrorInfo,
    HttpInbox,
    LoadMsg,
    ServeMsg,
    TextMsg,
)

logger = logging.getLogger(__name__)

# For the last events to reach clients that still read; the others would keep the process for ever.
_GOODBYE_S = 1.0


class MailInbox(Protocol):
    """What the mailroom reads: an ``AsyncInbox``."""

    async def receive(self) -> HttpInbox:
        """Wait for one message."""

    def drain(self) -> list[HttpInbox]:
        """Return what else has come."""


class Mailroom:
    """Takes in messages until the launcher says that this process should end.

    Args:
        front: The process's state.
        inbox: Where messages come from.
        serving: Called when requests are taken from now on.
    """

    def __init__(self, front: FrontEnd, inbox: MailInbox, serving: Callable[[], None]) -> None:
        self._front = front
        self._inbox = inbox
        self._serving = serving
        self._end = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Handle messages; returns when the process should end and open replies have been written."""
        receiving = asyncio.create_task(self._receive())
        ending = asyncio.create_task(self._end.wait())
        done, pending = await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        for task in done:
            task.result()  # an error in a handler is ours: it ends the process

    async def _receive(self) -> None:
        while True:
            # All that is there at once: a client then gets one chunk for several steps when this process is behind.
            messages = [await self._inbox.receive(), *self._inbox.drain()]
            self._deliver([message for message in messages if isinstance(message, TextMsg)])
            for message in messages:
                self._handle(message)
            await asyncio.sleep(0)  # a message that is there already is received without letting anybody else run

    def _deliver(self, messages: list[TextMsg]) -> None:
        if messages:
            self._front.streams.heard()
            self._front.streams.deliver([event for message in messages for event in message.events])

    def _handle(self, message: HttpInbox) -> None:
        front = self._front
        match message:
            case TextMsg():
                pass  # delivered, together with the others
            case LoadMsg():
                front.streams.heard()
                front.status.load = message
                front.metrics.set_load(message)
            case ServeMsg():
                front.status.serve(message)
                self._serving()
            case DrainMsg():
                front.status.phase = Phase.DRAINING
                self._end_after(message.limit_s, ErrorInfo(503, "server_draining", "The server is shutting down."))
            case DownMsg():
                logger.error("going down: %s", message.reason)
                front.status.phase = Phase.DOWN
                error = ErrorInfo(503, "server_down", f"The server cannot go on: {message.reason}.")
                front.streams.fail_all(error)
                self._end_after(0.0, error)

    def _end_after(self, limit_s: float, error: ErrorInfo) -> None:
        if self._draining is not None:
            self._draining.cancel()
        self._draining = asyncio.create_task(self._drain(limit_s, error))

    async def _drain(self, limit_s: float, error: ErrorInfo) -> None:
        """Wait for open requests, end those that are left with ``error``, then let the process end."""
        if not await _within(limit_s, self._front.streams.until_idle()):
            self._front.streams.fail_all(error)
            await _within(_GOODBYE_S, self._front.streams.until_idle())
        self._end.set()


async def _within(limit_s: float, work: Coroutine[None, None, None]) -> bool:
    try:
        await asyncio.wait_for(work, limit_s)
    except TimeoutError:
        return False
    return True
