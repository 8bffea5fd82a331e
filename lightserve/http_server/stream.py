"""The open choices of one HTTP request: read event by event, or once when all have ended.

Whoever opens a stream closes it (``with``); what still runs then is aborted, exactly once.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from lightserve.http_server.answer import Answer
from lightserve.http_server.choice import Choice
from lightserve.http_server.error_reply import INTERNAL_ERROR
from lightserve.http_server.events import num_tokens
from lightserve.http_server.limits import MAX_UNREAD_TOKENS
from lightserve.http_server.metrics import Metrics, failure_reason
from lightserve.ipc.messages import ErrorInfo, TextEvent

logger = logging.getLogger(__name__)

_SLOW_CLIENT = ErrorInfo(
    408, "client_too_slow", f"The client left more than {MAX_UNREAD_TOKENS} tokens of the stream unread."
)


class GenerationError(Exception):
    """A request ended with an error: the router refused it, or the server failed."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


class ClientGoneError(Exception):
    """The client closed its connection."""


class StreamOwner(Protocol):
    """Who knows all open streams; what their ends are told to."""

    metrics: Metrics

    def abort(self, req_ids: list[int]) -> None:
        """Tell the router that nobody waits for these any more."""

    def closed(self, stream: "Stream") -> None:
        """Forget a stream."""


class Stream(ABC):
    """The open choices of one HTTP request, and whoever waits for them. Made by ``Streams``.

    Choice i has the id ``first_req_id + i``.
    """

    def __init__(self, owner: StreamOwner, first_req_id: int, choices: Sequence[Choice]) -> None:
        self.first_req_id = first_req_id
        self.num_prompt_tokens = _num_prompt_tokens(choices)
        self._owner = owner
        self._running = set(range(first_req_id, first_req_id + len(choices)))
        self._failure: ErrorInfo | None = None
        self._client_gone = False
        self._waiter: asyncio.Future[None] | None = None
        self._opened_at = time.monotonic()
        self._first_event_at = 0.0
        self._num_tokens = 0

    @property
    def finished(self) -> bool:
        """Every choice has had its last event."""
        return not self._running

    def client_gone(self) -> None:
        """Note that nobody reads any more; whoever waits meets ``ClientGoneError``."""
        self._client_gone = True
        self._wake()

    def fail(self, error: ErrorInfo) -> None:
        """End the stream with an error; whoever waits meets ``GenerationError`` after what came before."""
        self._failure = self._failure or error
        self._wake()

    def push(self, event: TextEvent) -> None:
        """Take in one event; ``flush`` follows when there are no more for now."""
        if event.error is not None:
            self._end(event.req_id, _reason(event.error))
            self.fail(event.error)
            return
        if not self._first_event_at:
            self._note_first_event()
        self._num_tokens += num_tokens(event)
        if event.cached_len:
            self._owner.metrics.cached_prompt_tokens.inc(event.cached_len)
        if event.finish_reason is not None:
            self._end(event.req_id, event.finish_reason)
        if self._failure is None:
            self._take(event)

    def flush(self) -> None:
        """Let whoever waits have what has been pushed."""
        if self._ready():
            self._wake()

    def close(self) -> None:
        """Abort what still runs. Closing again does nothing."""
        if self._running:
            self._owner.abort(sorted(self._running))
            for req_id in list(self._running):
                self._end(req_id, _reason(self._failure))
        self._owner.closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.fail(INTERNAL_ERROR)
        self.close()

    @abstractmethod
    def _take(self, event: TextEvent) -> None:
        """Keep what an event brought."""

    @abstractmethod
    def _ready(self) -> bool:
        """Tell whether there is something to read."""

    async def _until_ready(self) -> None:
        while not (self._client_gone or self._failure or self._ready()):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._client_gone:
            raise ClientGoneError

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _note_first_event(self) -> None:
        self._first_event_at = time.monotonic()
        self._owner.metrics.prompt_tokens.inc(self.num_prompt_tokens)
        self._owner.metrics.time_to_first_token.observe(self._first_event_at - self._opened_at)

    def _end(self, req_id: int, reason: str) -> None:
        self._running.discard(req_id)
        self._owner.metrics.count_requests(reason)
        if not self._running:
            self._log_end(reason)

    def _log_end(self, reason: str) -> None:
        duration_s = time.monotonic() - self._opened_at
        self._owner.metrics.request_duration.observe(duration_s)
        logger.info(
            "req_id %d: %s, %d prompt tokens, %d generated, %s%.3f s in all",
            self.first_req_id,
            reason,
            self.num_prompt_tokens,
            self._num_tokens,
            f"{self._first_event_at - self._opened_at:.3f} s to the first, " if self._num_tokens else "",
            duration_s,
        )


class LiveStream(Stream):
    """A stream that is read event by event."""

    def __init__(self, owner: StreamOwner, first_req_id: int, choices: Sequence[Choice]) -> None:
        super().__init__(owner, first_req_id, choices)
        self._events: list[TextEvent] = []
        self._num_read_tokens = 0
        self._num_offered_tokens = 0  # that had come by the last flush: whoever reads has had a turn since
        self._write: Callable[[list[TextEvent]], bool] | None = None

    @property
    def exhausted(self) -> bool:
        """All has been received, and it ended well: another ``receive`` would wait for ever."""
        return self.finished and not self._events and self._failure is None

    def write_with(self, write: Callable[[list[TextEvent]], bool]) -> None:
        """Spare whoever waits in ``receive`` from waking up for every event.

        Args:
            write: Writes events at once, but for the last ones; False: it cannot, and ``receive`` returns them. What
                it raises, ``receive`` raises.
        """
        self._write = write

    def flush(self) -> None:
        """Write what has been pushed, or let ``receive`` return it. Give up a client that left too much before that."""
        if not self._write_directly():
            super().flush()
        if self._num_offered_tokens - self._num_read_tokens > MAX_UNREAD_TOKENS and self._failure is None:
            self.fail(_SLOW_CLIENT)
            self.close()  # whoever reads may be stuck in a write: free the slots now
        self._num_offered_tokens = self._num_tokens

    async def receive(self) -> list[TextEvent]:
        """Wait for events and return all that have come.

        Raises:
            GenerationError: A choice ended with an error, or the client is too slow.
            ClientGoneError: The client has left.
        """
        await self._until_ready()
        if self._failure is not None and not self._events:
            raise GenerationError(self._failure)
        return self._take_events()

    def _write_directly(self) -> bool:
        """Write what there is, unless the end is among it or something before it is still being written."""
        waiter = self._waiter
        if self._write is None or waiter is None or waiter.done() or not (self._events and self._running):
            return False
        try:
            if not self._write(self._events):
                return False
        except Exception as error:  # whoever waits meets it: it ends this reply, not those of all others
            waiter.set_exception(error)
        self._take_events()
        return True

    def _take_events(self) -> list[TextEvent]:
        events, self._events = self._events, []
        self._num_read_tokens = self._num_tokens
        return events

    def _take(self, event: TextEvent) -> None:
        self._events.append(event)

    def _ready(self) -> bool:
        return bool(self._events)


class WholeStream(Stream):
    """A stream that is read once, when every choice has ended."""

    def __init__(self, owner: StreamOwner, first_req_id: int, choices: Sequence[Choice]) -> None:
        super().__init__(owner, first_req_id, choices)
        self._answers = [Answer() for _ in choices]

    async def answers(self) -> list[Answer]:
        """Wait for the end; one answer per choice, in order.

        Raises:
            GenerationError: A choice ended with an error.
            ClientGoneError: The client has left.
        """
        await self._until_ready()
        if self._failure is not None:
            raise GenerationError(self._failure)
        return self._answers

    def _take(self, event: TextEvent) -> None:
        self._answers[event.req_id - self.first_req_id].add(event)

    def _ready(self) -> bool:
        return self.finished


def _num_prompt_tokens(choices: Sequence[Choice]) -> int:
    # The n choices of one prompt share its ids, and it is counted once.
    return sum({id(choice.prompt_ids): choice.num_prompt_tokens for choice in choices}.values())


def _reason(failure: ErrorInfo | None) -> str:
    """Say for the metrics how a request ended that did not end by itself."""
    return "abort" if failure is None else failure_reason(failure.status)
