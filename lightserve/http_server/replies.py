"""The two kinds of reply to a generation request: event by event, or whole.

Both open the stream, watch for the client's leaving from then on, and close the stream when they are done, however they
end. A streamed reply sends nothing before the first event has come, so that what the router refuses (429, 400) is a
proper status; an error after that is one last event.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lightserve.http_server.answer import Answer
from lightserve.http_server.choice import Choice
from lightserve.http_server.error_reply import error_reply
from lightserve.http_server.http_protocol import PART_WRITER, PartWriter
from lightserve.http_server.sse import HEADERS
from lightserve.http_server.stream import ClientGoneError, GenerationError, LiveStream, Stream
from lightserve.http_server.streams import Streams
from lightserve.ipc.messages import ErrorInfo, TextEvent


class StreamFormat(Protocol):
    """How one API writes a stream; one object per stream."""

    def write(self, events: list[TextEvent], first_req_id: int) -> bytes:
        """Write what has come; choice i has the id ``first_req_id + i``."""

    def end(self) -> bytes:
        """Write what follows the last event."""

    def error(self, error: ErrorInfo) -> bytes:
        """Write the last event of a stream that fails."""


class StreamedReply(Response):
    """Server-sent events.

    Args:
        streams: Where requests are opened.
        choices: What to generate.
        stream_format: How to write it.
    """

    def __init__(self, streams: Streams, choices: Sequence[Choice], stream_format: StreamFormat) -> None:
        super().__init__()
        self._streams = streams
        self._choices = choices
        self._format = stream_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        with self._streams.open_live(self._choices) as stream:
            async with _watching(receive, stream):
                try:
                    events = await stream.receive()
                except GenerationError as error:
                    await error_reply(error.info)(scope, receive, send)
                except ClientGoneError:
                    return
                else:
                    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                    self._write_directly(stream, scope)
                    await self._send_events(stream, events, send)

    def _write_directly(self, stream: LiveStream, scope: Scope) -> None:
        """Let events go out without waking this task, where the server can: that is most of what a token costs."""
        writer: PartWriter | None = scope.get("extensions", {}).get(PART_WRITER, {}).get("writer")
        if writer is None:
            return

        def write(events: list[TextEvent]) -> bool:
            if not writer.is_ready:
                return False
            part = self._format.write(events, stream.first_req_id)
            if part:
                writer.write(part)
            return True

        stream.write_with(write)

    async def _send_events(self, stream: LiveStream, events: list[TextEvent], send: Send) -> None:
        try:
            while not stream.exhausted:
                await _send_part(send, self._format.write(events, stream.first_req_id))
                events = await stream.receive()
            last = self._format.write(events, stream.first_req_id) + self._format.end()
        except GenerationError as error:
            last = self._format.error(error.info)
        except ClientGoneError:
            return
        await send({"type": "http.response.body", "body": last})


class WholeReply(Response):
    """One JSON object, when every choice has ended.

    Args:
        streams: Where requests are opened.
        choices: What to generate.
        make_body: Makes the object from the answers, one per choice.
    """

    def __init__(
        self, streams: Streams, choices: Sequence[Choice], make_body: Callable[[list[Answer]], msgspec.Struct]
    ) -> None:
        super().__init__()
        self._streams = streams
        self._choices = choices
        self._make_body = make_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        with self._streams.open_whole(self._choices) as stream:
            async with _watching(receive, stream):
                try:
                    reply = json_reply(self._make_body(await stream.answers()))
                except GenerationError as error:
                    reply = error_reply(error.info)
                except ClientGoneError:
                    return
                await reply(scope, receive, send)


def json_reply(body: Any, status: int = 200) -> Response:
    """Make a reply of anything that msgspec encodes."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


async def _send_part(send: Send, body: bytes) -> None:
    if body:  # nothing to say while a character or a possible stop string is unfinished
        await send({"type": "http.response.body", "body": body, "more_body": True})


@asynccontextmanager
async def _watching(receive: Receive, stream: Stream) -> AsyncIterator[None]:
    watch = asyncio.create_task(_watch(receive, stream))
    try:
        yield
    finally:
        watch.cancel()


async def _watch(receive: Receive, stream: Stream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.client_gone()
