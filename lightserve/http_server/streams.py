"""All open streams of this HTTP process: events find their client, and a client that leaves ends its requests.

One HTTP request is one stream of one or more choices, each a request of its own to the router. Late events of closed
streams are dropped.
"""

import asyncio
from collections.abc import Callable, Sequence

from lightserve.http_server.choice import Choice
from lightserve.http_server.events import num_tokens
from lightserve.http_server.metrics import Metrics
from lightserve.http_server.pulse import Pulse
from lightserve.http_server.status import Status
from lightserve.http_server.stream import LiveStream, Stream, WholeStream
from lightserve.ipc.messages import HTTP_INDEX_SHIFT, AbortMsg, ErrorInfo, GenerateMsg, TextEvent


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
        """Send ``choices`` to the router and return the stream of their answers.

        Raises:
            RequestError: 503, requests are not taken.
        """
        stream = WholeStream(self, self._next_req_id, choices)
        self._start(stream, choices)
        return stream

    def deliver(self, events: list[TextEvent]) -> None:
        """Hand events of one step, or of several, to their streams.

        Between two calls the event loop must have run: a client is slow only if its reader has had a turn.
        """
        num_generated = 0
        touched: dict[Stream, None] = {}
        for event in events:
            ended = event.finish_reason is not None or event.error is not None
            stream = self._by_req_id.pop(event.req_id, None) if ended else self._by_req_id.get(event.req_id)
            if stream is None:
                continue  # its client left; the abort is on its way
            num_generated += num_tokens(event)
            stream.push(event)
            touched[stream] = None
        for stream in touched:
            stream.flush()
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
        with self.metrics.counting_failures(len(choices)):
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
