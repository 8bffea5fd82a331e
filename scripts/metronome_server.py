"""A server that writes one token to every open stream at each tick and does nothing else.

It measures the load generator by itself: the processor time and the jitter that benchmark_sharegpt.py reports against
it are the client's own. Speaks ``/generate_stream`` and ``/v1/completions``.
"""

import argparse
import asyncio
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import httptools
import msgspec
import uvloop
from script_tools.flags import port, positive_float

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_INFO = msgspec.json.encode({"vocab_size": 32000, "version": "metronome", "data": [{"id": "metronome"}]})
_INFO_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_INFO)
_BACKLOG = 4096
# Streams written before the loop may look at its sockets again.
_BURST = 100


class Metronome:
    """The open streams.

    Args:
        interval_s: Between two ticks.
    """

    def __init__(self, interval_s: float) -> None:
        self.streams: dict[StreamConnection, None] = {}
        self._interval_s = interval_s

    async def run(self) -> None:
        """Tick for ever."""
        tick_at = time.monotonic()
        while True:
            tick_at = max(tick_at + self._interval_s, time.monotonic())
            await asyncio.sleep(tick_at - time.monotonic())
            for i, stream in enumerate(list(self.streams), start=1):
                stream.write_token()
                if i % _BURST == 0:
                    await asyncio.sleep(0)


class StreamConnection(asyncio.Protocol):
    """One client connection, with the callbacks of ``asyncio.Protocol`` and of ``httptools.HttpRequestParser``."""

    def __init__(self, metronome: Metronome) -> None:
        self._metronome = metronome
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._path = b""
        self._body = b""
        self._num_written = 0
        self._num_wanted = 0

    def write_token(self) -> None:
        """Write one event, and the end of the answer after the last."""
        self._num_written += 1
        ends = self._num_written == self._num_wanted
        event = self._completion_event(ends) if self._path.startswith(b"/v1/") else self._token_event(ends)
        self._transport.write(b"%x\r\n%s\r\n%s" % (len(event), event, b"0\r\n\r\n" if ends else b""))
        if ends:
            self._leave()

    def _token_event(self, ends: bool) -> bytes:
        return (
            b'data:{"token":{"id":345,"text":" word","logprob":-1.234567,"special":false,"count_output_tokens":%d,'
            b'"prompt_tokens":12},"generated_text":null,"finished":%s,"finish_reason":%s,"details":null}\n\n'
        ) % (self._num_written, b"true" if ends else b"false", b'"length"' if ends else b"null")

    def _completion_event(self, ends: bool) -> bytes:
        head = b'data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"metronome","choices":'
        event = head + b'[{"index":0,"text":" word","finish_reason":%s}]}\n\n' % (b'"length"' if ends else b"null")
        if not ends:
            return event
        usage = b'[],"usage":{"prompt_tokens":12,"completion_tokens":%d,"total_tokens":%d}}\n\ndata: [DONE]\n\n'
        return event + head + usage % (self._num_written, self._num_written + 12)

    def _leave(self) -> None:
        self._metronome.streams.pop(self, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self._leave()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:  # noqa: D102
        self._path = self._body = b""

    def on_url(self, url: bytes) -> None:  # noqa: D102
        self._path += url

    def on_body(self, body: bytes) -> None:  # noqa: D102
        self._body += body

    def on_message_complete(self) -> None:  # noqa: D102
        if not self._body:
            self._transport.write(_INFO_HEAD + _INFO)
            return
        body = msgspec.json.decode(self._body)
        self._num_written = 0
        self._num_wanted = body["max_tokens"] if "max_tokens" in body else body["parameters"]["max_new_tokens"]
        self._transport.write(_HEAD)
        self._metronome.streams[self] = None


async def _serve(port: int, interval_s: float) -> None:
    metronome = Metronome(interval_s)
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: StreamConnection(metronome), "127.0.0.1", port, backlog=_BACKLOG)
    await metronome.run()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=port, default=8001)
    parser.add_argument("--interval_s", type=positive_float, default=0.1)
    options = parser.parse_args(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(_serve(options.port, options.interval_s))


if __name__ == "__main__":
    main(sys.argv[1:])
