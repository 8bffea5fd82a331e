"""What the command and its client processes say to one another: length-prefixed MessagePack on the pipes."""

from asyncio import StreamReader

import msgspec


class TimedRequest(msgspec.Struct, frozen=True, array_like=True):
    """One request, ready to be sent.

    Attributes:
        index: Its place in the workload.
        offset_s: When to send it, in seconds after the start.
        body: The JSON body.
    """

    index: int
    offset_s: float
    body: bytes


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One client process's share of the load.

    Attributes:
        base_url: The server.
        api: Name of the API family.
        api_key: Sent as a bearer token.
        max_concurrency: Most requests in flight from this process; None: no limit.
        timeout_s: Longest that one request may take; None: no limit.
        requests: In order of ``offset_s``.
    """

    base_url: str
    api: str
    api_key: str | None
    max_concurrency: int | None
    timeout_s: float | None
    requests: list[TimedRequest]


class Start(msgspec.Struct, frozen=True, array_like=True):
    """Command -> client process: the moment that offsets count from.

    Attributes:
        at_s: On ``time.monotonic``, which all processes of a machine share.
    """

    at_s: float


class Stop(msgspec.Struct, frozen=True, array_like=True):
    """Command -> client process: report what has ended, and drop the rest."""


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of one request. Times are seconds on ``time.monotonic``.

    Attributes:
        index: Its place in the workload.
        start_s: When it was sent.
        end_s: When the server said it was finished, or when it failed.
        failure: Its kind; None when the request is done.
        detail: What the server or the system said about the failure.
        output_tokens: From the server's usage; None when it sent none.
        prompt_tokens: From the server's usage; None when it sent none.
        has_text: The answer was not empty.
        chunk_times: [num_reads] float64, when a read brought output.
        chunk_events: [num_reads] float64, events with output in that read.
        chunk_usage: [num_reads] float64, output tokens by usage after that read; 0 while the server has sent none.
    """

    index: int
    start_s: float
    end_s: float
    failure: str | None
    detail: str
    output_tokens: int | None
    prompt_tokens: int | None
    has_text: bool
    chunk_times: bytes
    chunk_events: bytes
    chunk_usage: bytes


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Client process -> command: it has its job and waits for the start."""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Client process -> command: where it stands.

    Attributes:
        num_done: Requests that ended as they should.
        num_failed: Requests that failed.
        num_open: Requests that were sent and have not ended.
    """

    num_done: int
    num_failed: int
    num_open: int


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Client process -> command: all its requests have ended, or it was told to stop.

    Attributes:
        outcomes: Of the requests that have ended.
        cpu_s: Processor time the process used between start and end.
    """

    outcomes: list[Outcome]
    cpu_s: float


ClientMsg = Ready | Progress | Finished

_PREFIX_BYTES = 8


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message with its length in front."""
    raw = msgspec.msgpack.encode(message)
    return len(raw).to_bytes(_PREFIX_BYTES, "little") + raw


async def read_frame(reader: StreamReader) -> bytes:
    """Read one encoded message.

    Raises:
        asyncio.IncompleteReadError: The other side has gone.
    """
    length = int.from_bytes(await reader.readexactly(_PREFIX_BYTES), "little")
    return await reader.readexactly(length)
