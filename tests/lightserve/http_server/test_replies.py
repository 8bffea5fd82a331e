"""Streamed replies: what is written directly and what waits for the client come out in one order."""

import asyncio
from typing import Any

import pytest

from lightserve.http_server.choice import Choice
from lightserve.http_server.http_protocol import PART_WRITER
from lightserve.http_server.limits import MAX_UNREAD_TOKENS
from lightserve.http_server.metrics import Metrics
from lightserve.http_server.pulse import Pulse
from lightserve.http_server.replies import StreamedReply
from lightserve.http_server.status import Status
from lightserve.http_server.streams import Streams
from lightserve.ipc.messages import ErrorInfo, ServeMsg, TextEvent, TextParams, pack_float32, pack_int32
from lightserve.sampling_params import SamplingParams


class Letters:
    """A format that writes the texts."""

    def write(self, events: list[TextEvent], first_req_id: int) -> bytes:
        return "".join(event.text for event in events).encode()

    def end(self) -> bytes:
        return b"."

    def error(self, error: ErrorInfo) -> bytes:
        return b"!"


class Client:
    """The client's side of ASGI, and the part writer beside it.

    Attributes:
        received: Bodies in order; those that were written directly in capitals.
    """

    def __init__(self) -> None:
        self.received = b""
        self._reads = asyncio.Event()
        self.read_on()

    def pause(self) -> None:
        self._reads.clear()

    def read_on(self) -> None:
        self._reads.set()

    @property
    def is_ready(self) -> bool:
        return self._reads.is_set()

    def write(self, part: bytes) -> None:
        assert part
        self.received += part.upper()

    async def send(self, message: Any) -> None:
        await self._reads.wait()
        self.received += message.get("body", b"")

    async def receive(self) -> Any:
        return await asyncio.Event().wait()


class Scene:
    """One reply to one client."""

    def __init__(self, *, has_writer: bool = True) -> None:
        status = Status(100)
        status.serve(ServeMsg(1000, 100))
        self._streams = Streams(0, lambda message: None, status, Metrics(), Pulse())
        choices = [Choice(pack_int32([1]), SamplingParams(max_new_tokens=9), TextParams())]
        self.client = Client()
        scope = {"extensions": {PART_WRITER: {"writer": self.client}}} if has_writer else {}
        reply = StreamedReply(self._streams, choices, Letters())
        self.replying = asyncio.create_task(reply(scope, self.client.receive, self.client.send))

    def say(self, text: str, reason: str | None = None, error: ErrorInfo | None = None, count: int = 1) -> None:
        token_ids, logprobs = pack_int32([7] * count), pack_float32([0.0] * count)
        self._streams.deliver([TextEvent(0, text, token_ids, logprobs, reason, error)])


async def settle() -> None:
    """Let everybody run who can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def begin(*, has_writer: bool = True) -> Scene:
    scene = Scene(has_writer=has_writer)
    await settle()
    scene.say("a")
    await settle()
    return scene


def test_all_but_the_first_and_the_last_part_is_written_directly() -> None:
    async def act() -> None:
        scene = await begin()
        scene.say("b")
        assert scene.client.received == b"aB"
        scene.say("")
        scene.say("c")
        scene.say("d", "stop")
        await scene.replying
        assert scene.client.received == b"aBCd."

    asyncio.run(act())


def test_nothing_overtakes_what_waits_for_the_client() -> None:
    async def act() -> None:
        scene = await begin()
        scene.client.pause()
        scene.say("b")
        await settle()
        scene.say("c")
        scene.client.read_on()
        scene.say("d")  # the client reads again, but b has not been sent yet
        await settle()
        scene.say("e")
        scene.say("f", "length")
        await scene.replying
        assert scene.client.received == b"abcdEf."

    asyncio.run(act())


def test_an_error_comes_after_what_was_written_directly() -> None:
    async def act() -> None:
        scene = await begin()
        scene.say("b")
        scene.say("", error=ErrorInfo(500, "failed", "It failed."))
        await scene.replying
        assert scene.client.received == b"aB!"

    asyncio.run(act())


def test_a_server_without_a_part_writer_gets_the_same_parts() -> None:
    async def act() -> None:
        scene = await begin(has_writer=False)
        scene.say("b")
        scene.say("c", "stop")
        await scene.replying
        assert scene.client.received == b"abc."

    asyncio.run(act())


def test_an_error_in_a_format_ends_its_own_reply_and_nothing_else() -> None:
    async def act() -> None:
        scene = await begin()
        scene.say("\udc80")  # no text that could be encoded
        with pytest.raises(UnicodeEncodeError):
            await scene.replying
        assert scene.client.received == b"a"
        scene.say("b")
        assert scene.client.received == b"a"

    asyncio.run(act())


def test_a_second_error_in_a_format_before_the_reply_has_met_the_first_changes_nothing() -> None:
    async def act() -> None:
        scene = await begin()
        scene.say("\udc80")
        scene.say("\udc80")
        with pytest.raises(UnicodeEncodeError):
            await scene.replying
        assert scene.client.received == b"a"

    asyncio.run(act())


def test_what_is_written_directly_is_no_backlog_however_long_the_stream() -> None:
    async def act() -> None:
        scene = await begin()
        for _ in range(3):
            scene.say("b", count=MAX_UNREAD_TOKENS)
            await settle()
        scene.say("c", "stop")
        await scene.replying
        assert scene.client.received == b"aBBBc."

    asyncio.run(act())


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_reply_that_is_broken_off_leaves_nothing_behind(is_paused: bool) -> None:
    async def act() -> None:
        scene = await begin()
        if is_paused:
            scene.client.pause()
            scene.say("b")
            await settle()
        scene.replying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scene.replying
        received = scene.client.received
        scene.say("c")
        assert scene.client.received == received

    asyncio.run(act())
