"""What arrives in the inbox, and what follows from it."""

import asyncio
from pathlib import Path

import pytest

from lightserve.http_server.choice import Choice
from lightserve.http_server.front_end import FrontEnd
from lightserve.http_server.limits import MAX_UNREAD_TOKENS
from lightserve.http_server.mailroom import Mailroom
from lightserve.http_server.status import Phase
from lightserve.http_server.stream import GenerationError
from lightserve.ipc.messages import (
    DownMsg,
    DrainMsg,
    HttpInbox,
    LoadMsg,
    ServeMsg,
    TextEvent,
    TextMsg,
    TextParams,
    pack_float32,
    pack_int32,
)
from lightserve.sampling_params import SamplingParams
from tests.lightserve.http_server.fake_engine import FakeEngine, Script
from tests.lightserve.http_server.live_server import make_front_end

LOAD = LoadMsg(1, 2, 3, 4, 5, 6, 7)
CHOICE = Choice(pack_int32([1]), SamplingParams(max_new_tokens=5), TextParams())


class Letters:
    """An inbox that holds what it was made with, one message at a time, then nothing for ever."""

    def __init__(self, *messages: HttpInbox) -> None:
        self._messages = list(messages)

    async def receive(self) -> HttpInbox:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop(0)

    def drain(self) -> list[HttpInbox]:
        return []


class Together(Letters):
    """An inbox that holds all that it was made with at once."""

    def drain(self) -> list[HttpInbox]:
        messages, self._messages = self._messages, []
        return messages


@pytest.fixture
def front(model_dir: Path) -> FrontEnd:
    engine = FakeEngine(script_for=lambda message: Script(silent_after=0))
    return make_front_end(model_dir, engine, max_req_total_len=512)


def text(req_id: int, num_tokens: int = 1) -> TextMsg:
    return TextMsg([TextEvent(req_id, "x", pack_int32([1] * num_tokens), pack_float32([0.0] * num_tokens))])


async def run(front: FrontEnd, *messages: HttpInbox) -> None:
    await asyncio.wait_for(Mailroom(front, Letters(*messages), lambda: None).run(), 10)


def test_serving_starts_with_the_limits_it_is_told(front: FrontEnd) -> None:
    front.status.phase = Phase.STARTING
    asyncio.run(run(front, ServeMsg(400, 100), LOAD, DrainMsg(0.0)))
    assert (front.status.max_total_token_num, front.status.max_req_total_len) == (400, 100)
    assert front.status.load == LOAD


def test_it_says_that_it_serves_once_it_does(front: FrontEnd) -> None:
    front.status.phase = Phase.STARTING
    phases: list[Phase] = []
    letters = Letters(ServeMsg(400, 100), DrainMsg(0.0))
    asyncio.run(Mailroom(front, letters, lambda: phases.append(front.status.phase)).run())
    assert phases == [Phase.SERVING]


def test_an_idle_server_drains_at_once(front: FrontEnd) -> None:
    asyncio.run(run(front, DrainMsg(60.0)))
    assert front.status.phase is Phase.DRAINING


def test_draining_waits_for_the_open_request(front: FrontEnd) -> None:
    async def scene() -> None:
        stream = front.streams.open_live([CHOICE])
        draining = asyncio.create_task(run(front, DrainMsg(60.0)))
        await asyncio.sleep(0.05)
        assert not draining.done()
        stream.close()
        await draining

    asyncio.run(scene())


@pytest.mark.parametrize("message", [DrainMsg(0.05), DownMsg("its router process ended")])
def test_what_is_left_open_ends_with_an_error(front: FrontEnd, message: HttpInbox) -> None:
    async def scene() -> None:
        with front.streams.open_live([CHOICE]) as stream:
            ending = asyncio.create_task(run(front, message))
            with pytest.raises(GenerationError) as failed:
                await stream.receive()
        await ending
        assert failed.value.info.status == 503

    asyncio.run(scene())


def test_going_down_cuts_a_drain_short(front: FrontEnd) -> None:
    async def scene() -> None:
        with front.streams.open_live([CHOICE]) as stream:
            ending = asyncio.create_task(run(front, DrainMsg(60.0), DownMsg("its router process ended")))
            with pytest.raises(GenerationError, match="router"):
                await stream.receive()
        await ending

    asyncio.run(scene())


def test_readers_run_however_fast_messages_come(front: FrontEnd) -> None:
    async def scene() -> None:
        with front.streams.open_live([CHOICE]) as stream:
            messages = [text(stream.first_req_id)] * 1000
            ending = asyncio.create_task(run(front, *messages, DrainMsg(0.0)))
            sizes = [len(await stream.receive()) for _ in range(20)]
        await ending
        assert max(sizes) < 100

    asyncio.run(scene())


def test_a_reader_has_its_turn_before_what_came_counts_as_unread(front: FrontEnd) -> None:
    async def scene() -> None:
        with front.streams.open_live([CHOICE]) as stream:
            messages = [text(stream.first_req_id, MAX_UNREAD_TOKENS + 1)] * 5
            ending = asyncio.create_task(run(front, *messages, DrainMsg(60.0)))
            for _ in messages:
                assert len(await stream.receive()) == 1
        await ending

    asyncio.run(scene())


def test_texts_that_have_come_together_reach_a_reader_together(front: FrontEnd) -> None:
    async def scene() -> None:
        with front.streams.open_live([CHOICE]) as stream:
            letters = Together(text(stream.first_req_id), LOAD, text(stream.first_req_id), DrainMsg(0.0))
            ending = asyncio.create_task(Mailroom(front, letters, lambda: None).run())
            assert len(await stream.receive()) == 2
            assert front.status.load == LOAD
        await asyncio.wait_for(ending, 10)

    asyncio.run(scene())
