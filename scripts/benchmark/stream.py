"""One streamed answer: what came, when, and how it ended."""

import asyncio
import time
from array import array

import msgspec

from benchmark.api import Answer, ApiFamily
from benchmark.messages import Outcome
from benchmark.sse import SseParser

_DETAIL_BYTES = 300
_GOOD_STATUS = 200
# Reasons that servers give for answers they broke off.
_BROKEN_OFF = frozenset({"abort", "error"})


class Stream:
    """Sink of one response. Events of one read arrive together: they make one entry of the record.

    Attributes:
        ended: Resolves when nothing more will come.
    """

    def __init__(self, family: ApiFamily, index: int) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._read_event = family.read_event
        self._index = index
        self._start_s = time.monotonic()
        self._end_s = 0.0
        self._status = 0
        self._parser = SseParser()
        self._answer = Answer()
        self._failure: str | None = None
        self._detail = ""
        self._error_body = b""
        self._times = array("d")
        self._events = array("d")
        self._usage = array("d")

    def on_status(self, status: int) -> None:
        """Take the status of the response."""
        self._status = status

    def on_body(self, chunk: bytes, read_at_s: float) -> None:
        """Take a part of the body."""
        if self._status != _GOOD_STATUS:
            self._error_body += chunk[:_DETAIL_BYTES]
            return
        answer = self._answer
        events_before, was_finished = answer.num_events, answer.finished
        try:
            for data in self._parser.feed(chunk):
                self._read_event(data, answer)
        except msgspec.DecodeError as error:
            self.fail("bad_event", str(error))
        if answer.num_events > events_before:
            self._record(read_at_s, answer.num_events - events_before, answer.output_tokens or 0)
        if answer.finished and not was_finished:
            self._end_s = read_at_s

    def _record(self, read_at_s: float, num_events: int, usage: int) -> None:
        if self._times and self._times[-1] == read_at_s:
            self._events[-1] += num_events
            self._usage[-1] = usage
        else:
            self._times.append(read_at_s)
            self._events.append(num_events)
            self._usage.append(usage)

    def on_end(self) -> None:
        """Take the end of the response."""
        if self._status != _GOOD_STATUS:
            self.fail(f"http_{self._status}", self._error_body.decode(errors="replace"))
        elif not self._answer.finished:
            self.fail("truncated", "the stream ended without a finish reason")
        self._end()

    def on_lost(self, reason: str) -> None:
        """Take the loss of the connection: harmless after an answer that is complete."""
        if not self._answer.finished:
            self.fail("disconnected", reason)
        self._end()

    def fail(self, kind: str, detail: str) -> None:
        """Note a failure. The first one stands; what an error event said comes before how the stream then ended."""
        if self._failure is not None:
            return
        if self._answer.error is not None:
            kind, detail = "error_event", self._answer.error
        self._failure, self._detail = kind, detail[:_DETAIL_BYTES]

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def outcome(self) -> Outcome:
        """Return the record of the request; it has ended."""
        answer = self._answer
        if answer.error is not None:
            self.fail("error_event", answer.error)
        elif answer.finish_reason in _BROKEN_OFF:
            self.fail("aborted", f"finish_reason {answer.finish_reason}")
        elif answer.output_tokens == 0 or answer.num_events == 0:
            self.fail("empty", "the answer has no token")
        return Outcome(
            index=self._index,
            start_s=self._start_s,
            end_s=self._end_s or time.monotonic(),
            failure=self._failure,
            detail=self._detail,
            output_tokens=answer.output_tokens,
            prompt_tokens=answer.prompt_tokens,
            has_text=answer.has_text,
            chunk_times=self._times.tobytes(),
            chunk_events=self._events.tobytes(),
            chunk_usage=self._usage.tobytes(),
        )
