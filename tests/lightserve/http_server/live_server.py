"""The HTTP server on a free loopback port, in a thread, with a fake engine behind it."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import uvicorn
import uvloop

from lightserve.http_server.app import build_app
from lightserve.http_server.chat_template import ChatTemplate
from lightserve.http_server.front_end import FrontEnd
from lightserve.http_server.metrics import Metrics
from lightserve.http_server.prompts import Prompts
from lightserve.http_server.pulse import Pulse
from lightserve.http_server.server import Server, uvicorn_config
from lightserve.http_server.status import Status
from lightserve.http_server.streams import Streams
from lightserve.ipc.messages import LoadMsg, ServeMsg
from lightserve.tokenizer import Tokenizer
from tests.lightserve.http_server.fake_engine import POOL, FakeEngine
from tests.server import wait_until

MODEL = "tiny"
VOCAB_SIZE = 258
T = TypeVar("T")


@dataclass
class LiveServer:
    """A server under test; the client asks it, the rest looks inside."""

    url: str
    client: httpx.Client
    front: FrontEnd
    engine: FakeEngine
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the server's loop."""

        async def on_loop() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(on_loop(), self.loop).result(10)

    def until(self, condition: Callable[[], bool], limit_s: float = 5.0) -> None:
        """Wait until a condition holds; fail when it does not in time."""
        wait_until(condition, "the condition did not come true", limit_s)

    def until_idle(self) -> None:
        """Wait until no request is open, here and in the engine."""
        self.until(lambda: self.front.streams.num_open == 0 and self.engine.num_running == 0)


def make_front_end(folder: Path, engine: FakeEngine, *, max_req_total_len: int) -> FrontEnd:
    """Make the state of an HTTP process whose router is ``engine``."""
    status = Status(max_req_total_len)
    status.serve(ServeMsg(POOL, max_req_total_len))
    metrics = Metrics()
    tokenizer = Tokenizer.load(folder)
    source = tokenizer.chat_template
    encode_chat = None if source is None else ChatTemplate(source, tokenizer).encode_chat
    streams = Streams(0, engine.send, status, metrics, Pulse())
    engine.streams = streams

    def on_load(load: LoadMsg) -> None:
        status.load = load
        metrics.set_load(load)

    engine.on_load = on_load
    return FrontEnd(MODEL, 1, status, streams, Prompts(tokenizer, encode_chat, VOCAB_SIZE, status), metrics)


@contextmanager
def live_server(
    folder: Path, *, max_req_total_len: int = 512, api_key: str | None = None, serving: bool = True
) -> Iterator[LiveServer]:
    """Run a server while the block lasts."""
    engine = FakeEngine()
    front = make_front_end(folder, engine, max_req_total_len=max_req_total_len)
    app = build_app(front, api_key=api_key, server_info={"version": "test"})
    up = threading.Event()
    server = Server(uvicorn_config(app), up.set)
    loop = uvloop.new_event_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=_run, args=(loop, server, listener))
    thread.start()
    up.wait(10)
    with httpx.Client(base_url=url, timeout=20) as client:
        yield LiveServer(url, client, front, engine, loop)
    server.should_exit = True
    thread.join(10)
    front.prompts.close()


def _run(loop: asyncio.AbstractEventLoop, server: uvicorn.Server, listener: socket.socket) -> None:
    loop.run_until_complete(server.serve(sockets=[listener]))
    loop.close()
