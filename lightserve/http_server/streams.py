"""Open requests of this HTTP process: events find their client, and a client that leaves ends its requests.

One HTTP request is one stream of one or more choices, each a request of its own to the router. Whoever opens a stream
closes it (``with``); what still runs then is aborted, exactly once. Late events of closed streams are dropped.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from lightserve.http_server.limits import MAX_UNREAD_TOKENS
from lightserve.http_server.metrics import Metrics
from lightserve.http_server.pulse import Pulse
from lightserve.http_server.status import Status
from lightserve.ipc.messages import (
    HTTP_INDEX_SHIFT,
    AbortMsg,
    ErrorInfo,
    GenerateMsg,
    Int32s,
    TextEvent,
    TextParams,
)
from lightserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_INT32_BYTES = 4
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


class Choice(msgspec.Struct, frozen=True):
    """One answer to generate: a ``GenerateMsg`` before it has its number."""

    prompt_ids: Int32s
    sampling: SamplingParams
    text: TextParams
    priority: int = 0
    timeout_s: float = 0.0
    cache_salt: str = ""

    def message(self, req_id: int) -> GenerateMsg:
        """Make the message to the router."""
        return GenerateMsg(
            req_id, self.prompt_ids, self.sampling, self.text, self.priority, self.timeout_s, self.cache_salt
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids) // _INT32_BYTES


class Answer:
    """One choice's answer, gathered event by event."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.num_tokens = 0
        self.cached_len = 0
        self.finish_reason = ""

    def add(self, event: TextEvent) -> None:
        """Append what one event brought."""
        self._texts.append(event.text)
        self.num_tokens += num_tokens(event)
        self.cached_len += event.cached_len
        self.finish_reason = event.finish_reason or self.finish_reason

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._texts)


def num_tokens(event: TextEvent) -> int:
    """Return how many generated ids an event counts."""
    return len(event.token_ids) // _INT32_BYTES


def merge_events(events: list[TextEvent]) -> list[TextEvent]:
    """Join the events of each request into one, so that a client that fell behind costs one chunk, not many."""
    if len(events) == 1:
        return events
    merged: dict[int, TextEvent] = {}
    for event in events:
        earlier = merged.get(event.req_id)
        merged[event.req_id] = event if earlier is None else _join(earlier, event)
    return list(merged.values())


def _join(first: TextEvent, then: TextEvent) -> TextEvent:
    return TextEvent(
        first.req_id,
        first.text + then.text,
        first.token_ids + then.token_ids,
        first.logprobs + then.logprobs,
        then.finish_reason,
        cached_len=first.cached_len + then.cached_len,
    )


def _num_prompt_tokens(choices: Sequence[Choice]) -> int:
    # The n choices of one prompt share its ids, and it is counted once.
    return sum({id(choice.prompt_ids): choice.num_prompt_tokens for choice in choices}.values())


def _reason(failure: ErrorInfo | None) -> str:
    """Say for the metrics how a request ended that did not end by itself."""
    if failure is None:
        return "abort"
    return "refused" if failure.status < 500 else "error"


class Stream(ABC):
    """The open choices of one HTTP request, and whoever waits for them. Made by ``Streams.open_*``.

    Choice i has the id ``first_req_id + i``.
    """

    def __init__(self, streams: "Streams", first_req_id: int, choices: Sequence[Choice]) -> None:
        self.first_req_id = first_req_id
        self.num_prompt_tokens = _num_prompt_tokens(choices)
        self._streams = streams
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
        """Take in one event."""
        if event.error is not None:
            self._end(event.req_id, _reason(event.error))
            self.fail(event.error)
            return
        if not self._first_event_at:
            self._note_first_event()
        self._num_tokens += num_tokens(event)
        if event.cached_len:
            self._streams.metrics.cached_prompt_tokens.inc(event.cached_len)
        if event.finish_reason is not None:
            self._end(event.req_id, event.finish_reason)
        if self._failure is None:
            self._take(event)
        if self._ready():
            self._wake()

    def close(self) -> None:
        """Abort what still runs. Closing again does nothing."""
        if self._running:
            self._streams.abort(sorted(self._running))
            for req_id in list(self._running):
                self._end(req_id, _reason(self._failure))
        self._streams.closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        self._streams.metrics.prompt_tokens.inc(self.num_prompt_tokens)
        self._streams.metrics.time_to_first_token.observe(self._first_event_at - self._opened_at)

    def _end(self, req_id: int, reason: str) -> None:
        self._running.discard(req_id)
        self._streams.metrics.count_request(reason)
        if not self._running:
            self._log_end(reason)

    def _log_end(self, reason: str) -> None:
        now = time.monotonic()
        self._streams.metrics.request_duration.observe(now - self._opened_at)
        logger.info(
            "req_id %d: %s, %d prompt tokens, %d generated, %.3f s to the first, %.3f s in all",
            self.first_req_id,
            reason,
            self.num_prompt_tokens,
            self._num_tokens,
            (self._first_event_at or now) - self._opened_at,
            now - self._opened_at,
        )


class LiveStream(Stream):
    """A stream that is read event by event."""

    def __init__(self, streams: "Streams", first_req_id: int, choices: Sequence[Choice]) -> None:
        super().__init__(streams, first_req_id, choices)
        self._events: list[TextEvent] = []
        self._unread_tokens = 0

    @property
    def exhausted(self) -> bool:
        """All has been received, and it ended well: another ``receive`` would wait for ever."""
        return self.finished and not self._events and self._failure is None

    async def receive(self) -> list[TextEvent]:
        """Wait for events and return all that have come.

        Raises:
            GenerationError: A choice ended with an error, or the client is too slow.
            ClientGoneError: The client has left.
        """
        await self._until_ready()
        if self._failure is not None and not self._events:
            raise GenerationError(self._failure)
        events, self._events = self._events, []
        self._unread_tokens = 0
        return events

    def _take(self, event: TextEvent) -> None:
        self._events.append(event)
        self._unread_tokens += num_tokens(event)
        if self._unread_tokens > MAX_UNREAD_TOKENS and self._failure is None:
            self.fail(_SLOW_CLIENT)
            self.close()  # whoever reads may be stuck in a write: free the slots now

    def _ready(self) -> bool:
        return bool(self._events)


class WholeStream(Stream):
    """A stream that is read once, when every choice has ended."""

    def __init__(self, streams: "Streams", first_req_id: int, choices: Sequence[Choice]) -> None:
        super().__init__(streams, first_req_id, choices)
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


class Streams:
    """All open streams of this process.

    Args:
        http_index: This HTTP server's index, the high bits of its request ids.
        send: Hands a message to the router.
        status: Whether requests are taken.
        metrics: What is counted.
        pulse: The engine's.
    """

    def __init__(
        self,
        http_index: int,
        send: Callable[[GenerateMsg | AbortMsg], None],
        status: Status,
        metrics: Metrics,
        pulse: Pulse,
    ) -> None:
        self.metrics = metrics
        self._send = send
        self._status = status
        self._next_req_id = http_index << HTTP_INDEX_SHIFT
        self._by_req_id: dict[int, Stream] = {}
        self._open: set[Stream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._pulse = pulse

    def open_live(self, choices: Sequence[Choice]) -> LiveStream:
        """Send ``choices`` to the router and return the stream of their events.

        Raises:
            RequestError: 503, requests are not taken.
        """
        stream = LiveStream(self, self._next_req_id, choices)
        self._start(stream, choices)
        return stream

    def open_whole(self, choices: Sequence[Choice]) -> WholeStream:
        """Send ``choices`` to the router and return the stream of their answers. Raises as ``open_live``."""
        stream = WholeStream(self, self._next_req_id, choices)
        self._start(stream, choices)
        return stream

    def deliver(self, events: list[TextEvent]) -> None:
        """Hand one step's events to their streams."""
        num_generated = 0
        for event in events:
            ended = event.finish_reason is not None or event.error is not None
            stream = self._by_req_id.pop(event.req_id, None) if ended else self._by_req_id.get(event.req_id)
            if stream is None:
                continue  # its client left; the abort is on its way
            num_generated += num_tokens(event)
            stream.push(event)
        self.metrics.generated_tokens.inc(num_generated)

    def heard(self) -> None:
        """Note a sign of life of the engine."""
        if self._by_req_id:
            self._pulse.hear()

    def stall_s(self) -> float:
        """Return for how long requests have been waiting without a sign of life; 0 while that is no reason to worry."""
        silence_s = self._pulse.silence_s
        return silence_s if self._by_req_id and silence_s > self._pulse.limit_s else 0.0

    def fail_all(self, error: ErrorInfo) -> None:
        """End every open request with an error."""
        for stream in list(self._open):
            stream.fail(error)

    async def until_idle(self) -> None:
        """Wait until no stream is open."""
        await self._idle.wait()

    @property
    def num_open(self) -> int:
        """HTTP requests whose reply is not complete."""
        return len(self._open)

    def abort(self, req_ids: list[int]) -> None:
        """Tell the router that nobody waits for these any more; called by their stream alone."""
        for req_id in req_ids:
            del self._by_req_id[req_id]
        self._send(AbortMsg(req_ids))

    def closed(self, stream: Stream) -> None:
        """Forget a stream; called by it alone."""
        self._open.discard(stream)
        if not self._open:
            self._idle.set()
        self.metrics.open_requests.set(len(self._open))

    def _start(self, stream: Stream, choices: Sequence[Choice]) -> None:
        self._status.check_serving()
        if not self._by_req_id:
            self._pulse.start()
        self._open.add(stream)
        self._idle.clear()
        self.metrics.open_requests.set(len(self._open))
        for choice in choices:
            self._by_req_id[self._next_req_id] = stream
            self._send(choice.message(self._next_req_id))
            self._next_req_id += 1
