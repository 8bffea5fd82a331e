"""Streams by themselves: any order of events, endings and departures leaves nothing behind and aborts each id once."""

import asyncio
import logging
import re
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lightserve.errors import RequestError
from lightserve.http_server.choice import Choice
from lightserve.http_server.events import merge_events
from lightserve.http_server.limits import MAX_UNREAD_TOKENS
from lightserve.http_server.metrics import Metrics
from lightserve.http_server.pulse import Pulse
from lightserve.http_server.status import Phase, Status
from lightserve.http_server.stream import ClientGoneError, GenerationError, Stream
from lightserve.http_server.streams import Streams
from lightserve.ipc.messages import (
    HTTP_INDEX_SHIFT,
    AbortMsg,
    ErrorInfo,
    GenerateMsg,
    ServeMsg,
    TextEvent,
    TextParams,
    pack_float32,
    pack_int32,
)
from lightserve.sampling_params import SamplingParams

FAILURE = ErrorInfo(500, "failed", "It failed.")


def make_choices(number: int) -> list[Choice]:
    return [Choice(pack_int32([1, 2]), SamplingParams(max_new_tokens=9), TextParams())] * number


def make_event(
    req_id: int, text: str = "x", reason: str | None = None, error: ErrorInfo | None = None, count: int = 1
) -> TextEvent:
    return TextEvent(req_id, text, pack_int32([7] * count), pack_float32([0.0] * count), reason, error)


def soon(work: Coroutine[Any, Any, Any]) -> Any:
    """Run what must not have to wait."""
    return asyncio.run(asyncio.wait_for(work, 5))


class Sent:
    """The router's end: what was sent to it."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.aborted: list[int] = []

    def __call__(self, message: GenerateMsg | AbortMsg) -> None:
        match message:
            case GenerateMsg():
                self.started.append(message.req_id)
            case AbortMsg():
                self.aborted += message.req_ids


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def status() -> Status:
    status = Status(100)
    status.serve(ServeMsg(1000, 100))
    return status


@pytest.fixture
def streams(sent: Sent, status: Status) -> Streams:
    return Streams(3, sent, status, Metrics(), Pulse())


def test_ids_tell_the_http_server_and_never_repeat(streams: Streams, sent: Sent) -> None:
    streams.open_live(make_choices(2))
    streams.open_whole(make_choices(1))
    assert [req_id >> HTTP_INDEX_SHIFT for req_id in sent.started] == [3, 3, 3]
    assert len(set(sent.started)) == 3


def test_all_that_has_come_is_received_at_once(streams: Streams) -> None:
    stream = streams.open_live(make_choices(1))
    streams.deliver([make_event(stream.first_req_id, "a")])
    streams.deliver([make_event(stream.first_req_id, "b")])
    assert [event.text for event in soon(stream.receive())] == ["a", "b"]


def test_a_stream_is_exhausted_when_its_end_has_been_received_and_was_no_error(streams: Streams) -> None:
    well, ill = streams.open_live(make_choices(1)), streams.open_live(make_choices(1))
    streams.deliver([make_event(well.first_req_id, "a", "stop"), make_event(ill.first_req_id, "a")])
    streams.deliver([make_event(ill.first_req_id, error=FAILURE)])
    assert (well.finished, well.exhausted) == (True, False)
    for stream in (well, ill):
        soon(stream.receive())
    assert (well.exhausted, ill.exhausted) == (True, False)


def test_events_of_one_request_merge_in_order() -> None:
    events = [make_event(1, "a"), make_event(2, "x", "stop"), make_event(1, "b", "length", count=2)]
    assert merge_events(events) == [make_event(1, "ab", "length", count=3), make_event(2, "x", "stop")]


def test_what_came_before_an_error_is_received_first(streams: Streams) -> None:
    stream = streams.open_live(make_choices(1))
    streams.deliver([make_event(stream.first_req_id, "a")])
    streams.deliver([make_event(stream.first_req_id, error=FAILURE)])

    async def read() -> None:
        assert [event.text for event in await stream.receive()] == ["a"]
        with pytest.raises(GenerationError, match="It failed"):
            await stream.receive()

    soon(read())


def test_an_error_of_one_choice_ends_the_whole_and_aborts_the_others(streams: Streams, sent: Sent) -> None:
    with streams.open_whole(make_choices(3)) as stream:
        streams.deliver([make_event(stream.first_req_id + 1, error=FAILURE)])
        with pytest.raises(GenerationError):
            soon(stream.answers())
    assert sent.aborted == [stream.first_req_id, stream.first_req_id + 2]


def test_a_client_that_never_reads_is_given_up_and_aborted_at_once(streams: Streams, sent: Sent) -> None:
    stream = streams.open_live(make_choices(1))
    for _ in range(MAX_UNREAD_TOKENS + 100):
        streams.deliver([make_event(stream.first_req_id)])
    assert sent.aborted == [stream.first_req_id]

    async def read() -> None:
        assert len(await stream.receive()) == MAX_UNREAD_TOKENS + 2
        with pytest.raises(GenerationError, match="unread"):
            await stream.receive()

    soon(read())
    stream.close()
    assert sent.aborted == [stream.first_req_id]


def test_a_waiting_reader_is_not_given_up_for_what_comes_at_once(streams: Streams, sent: Sent) -> None:
    async def read() -> None:
        stream = streams.open_live(make_choices(1))
        for reason in (None, None, "length"):
            reading = asyncio.create_task(stream.receive())
            await asyncio.sleep(0)
            *events, last = [make_event(stream.first_req_id)] * (MAX_UNREAD_TOKENS + 100)
            streams.deliver([*events, msgspec.structs.replace(last, finish_reason=reason)])
            assert len(await reading) == MAX_UNREAD_TOKENS + 100
        assert stream.exhausted

    soon(read())
    assert not sent.aborted


def test_nothing_is_opened_while_the_server_takes_no_requests(streams: Streams, status: Status, sent: Sent) -> None:
    status.phase = Phase.DRAINING
    with pytest.raises(RequestError) as refused:
        streams.open_live(make_choices(1))
    assert refused.value.status == 503
    assert not sent.started


def test_until_idle_waits_for_the_last_stream(streams: Streams) -> None:
    async def wait() -> None:
        await streams.until_idle()
        first, second = streams.open_live(make_choices(1)), streams.open_whole(make_choices(1))
        waiting = asyncio.create_task(streams.until_idle())
        first.close()
        await asyncio.sleep(0)
        assert not waiting.done()
        second.close()
        await waiting

    soon(wait())


def test_a_waiting_reader_meets_its_clients_leaving(streams: Streams) -> None:
    async def read() -> None:
        stream = streams.open_live(make_choices(1))
        reading = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        stream.client_gone()
        with pytest.raises(ClientGoneError):
            await reading

    soon(read())


@pytest.mark.parametrize(
    ("events", "line"),
    [
        ([], r"abort, 2 prompt tokens, 0 generated, \d+\.\d{3} s in all"),
        ([{"count": 0}], r"abort, 2 prompt tokens, 0 generated, \d+\.\d{3} s in all"),
        ([{"error": FAILURE}], r"\w+, 2 prompt tokens, 0 generated, \d+\.\d{3} s in all"),
        ([{}], r"abort, 2 prompt tokens, 1 generated, \d+\.\d{3} s to the first, \d+\.\d{3} s in all"),
        ([{"reason": "stop"}], r"stop, 2 prompt tokens, 1 generated, \d+\.\d{3} s to the first, \d+\.\d{3} s in all"),
    ],
)
def test_the_log_tells_the_time_to_the_first_token_where_there_was_one(
    streams: Streams, caplog: pytest.LogCaptureFixture, events: list[dict[str, Any]], line: str
) -> None:
    with caplog.at_level(logging.INFO, logger="lightserve"), streams.open_live(make_choices(1)) as stream:
        for event in events:
            streams.deliver([make_event(stream.first_req_id, **event)])
    (message,) = caplog.messages
    assert re.fullmatch(f"req_id {stream.first_req_id}: {line}", message)


class StreamsMachine(RuleBasedStateMachine):
    """Streams against a naive model: which ids of which stream still run."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = Sent()
        status = Status(100)
        status.serve(ServeMsg(1000, 100))
        self.now = 0.0
        self.streams = Streams(0, self.sent, status, Metrics(), Pulse(lambda: self.now))
        self.running: dict[Stream, set[int]] = {}
        self.expected_aborts: list[int] = []

    @rule(number=st.integers(1, 3), live=st.booleans())
    def open_stream(self, number: int, live: bool) -> None:
        choices = make_choices(number)
        stream: Stream = self.streams.open_live(choices) if live else self.streams.open_whole(choices)
        self.running[stream] = set(range(stream.first_req_id, stream.first_req_id + number))

    @precondition(lambda self: self.sent.started)
    @rule(data=st.data(), reason=st.sampled_from([None, None, "stop", "length"]), fails=st.booleans())
    def deliver(self, data: st.DataObject, reason: str | None, fails: bool) -> None:
        req_id = data.draw(st.sampled_from(self.sent.started))  # also one that has ended, or whose client left
        self.streams.deliver([make_event(req_id, reason=reason, error=FAILURE if fails else None)])
        if reason is not None or fails:
            for ids in self.running.values():
                ids.discard(req_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(list(self.running)))
        self.expected_aborts += sorted(self.running.pop(stream))
        stream.close()
        stream.close()

    @invariant()
    def each_id_is_aborted_once_and_only_if_it_ran(self) -> None:
        assert self.sent.aborted == self.expected_aborts

    @invariant()
    def open_streams_are_counted(self) -> None:
        assert self.streams.num_open == len(self.running)

    @invariant()
    def streams_know_whether_they_are_finished(self) -> None:
        assert all(stream.finished == (not ids) for stream, ids in self.running.items())

    @invariant()
    def silence_counts_only_while_something_runs(self) -> None:
        self.now += 1000
        assert (self.streams.stall_s() > 0) == any(self.running.values())
        self.now -= 1000


StreamsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestStreamsMachine = StreamsMachine.TestCase
