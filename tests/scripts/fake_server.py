"""A server that answers whatever a test wants, byte by byte."""

import asyncio
import itertools
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

# Steps of an answer: bytes are written, a number is a pause in seconds.
Steps = list[bytes | float]

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


class FakeServer:
    """Answers each POST with the steps that ``answer`` gives for its number; closes after steps without ``END``."""

    def __init__(self, answer: Callable[[int], Steps]) -> None:
        self._answer = answer
        self._count = itertools.count()
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_connections = 0
        self.num_open = 0
        self.max_open = 0
        self._serving: set[asyncio.Task[Any] | None] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._serving.add(asyncio.current_task())
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has closed, or the test is over
        finally:
            self._serving.remove(asyncio.current_task())
            writer.close()

    async def close(self) -> None:
        """Leave the answers that pause."""
        serving = [task for task in self._serving if task]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            writer.write(json_reply(_about(head.split()[1])))
            return True
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
        body = json.loads(await reader.readexactly(length))
        if head.startswith("POST /tokenize"):
            writer.write(json_reply({"count": len(body["prompt"].split())}))
            return True
        self.heads.append(head)
        self.bodies.append(body)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        steps = self._answer(next(self._count))
        try:
            for step in steps:
                await _take_step(step, writer)
        finally:
            self.num_open -= 1
        return bool(steps) and steps[-1] == END


async def _take_step(step: bytes | float, writer: asyncio.StreamWriter) -> None:
    if isinstance(step, bytes):
        writer.write(step)
        await writer.drain()
    else:
        await asyncio.sleep(step)


def _about(path: str) -> Any:
    return {"data": [{"id": "fake"}]} if path == "/v1/models" else {"vocab_size": 1000, "version": "fake"}


def json_reply(value: Any, status: str = "200 OK") -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        status.encode(),
        len(body),
        body,
    )


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def text_event(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage_event(count: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}})


def completion(num_events: int, usage: int | None = None, text: str = " ", pause_s: float = 0.0) -> Steps:
    """A good answer: so many events, one per read where there is a pause."""
    steps: Steps = [CHUNKED]
    for _ in range(num_events):
        steps += [chunk(text_event(text)), pause_s]
    closing = text_event("", "length") + (usage_event(usage) if usage is not None else b"") + DONE
    return [*steps, chunk(closing), END]


@asynccontextmanager
async def listening(server: FakeServer) -> AsyncIterator[str]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    listener.close()
    await server.close()
    await listener.wait_closed()


@contextmanager
def in_a_thread(server: FakeServer) -> Iterator[str]:
    """Run a server beside the whole command."""
    urls: queue.Queue[str] = queue.Queue()
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with listening(server) as url:
            urls.put(url)
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield urls.get(timeout=10)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
