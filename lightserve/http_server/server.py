"""Puts one HTTP process together: links, state, routes, uvicorn."""

import asyncio
import dataclasses
import gc
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from lightserve.boot import Boot
from lightserve.child import freeze_garbage_collector, process_name
from lightserve.http_server.app import build_app
from lightserve.http_server.chat_template import ChatTemplate
from lightserve.http_server.front_end import FrontEnd
from lightserve.http_server.http_protocol import BoundedHttpProtocol, notice_lost_clients
from lightserve.http_server.limits import CONNECT_BACKLOG
from lightserve.http_server.mailroom import Mailroom
from lightserve.http_server.metrics import Metrics
from lightserve.http_server.prompts import Prompts
from lightserve.http_server.pulse import Pulse
from lightserve.http_server.status import Status
from lightserve.http_server.streams import Streams
from lightserve.ipc.links import AsyncInbox, Outbox
from lightserve.ipc.messages import AbortMsg, GenerateMsg, HttpInbox, ReadyMsg, ServingMsg
from lightserve.tokenizer import Tokenizer

# Longer than clients keep idle connections, or one would be closed just as its client uses it again.
_KEEP_ALIVE_S = 75
_GRACEFUL_S = 2
# With Python's own (700, 10, 10) the collector walks through all open requests six times while 3,000 of them come,
# which is 30 % of what they cost; so it does twice.
_GC_THRESHOLDS = (10_000, 10, 10)


async def serve(boot: Boot, index: int) -> None:
    """Serve until the launcher says that it is over.

    Args:
        boot: What the launcher found out.
        index: Which of the HTTP processes this is.
    """
    name = process_name("http_server", index)
    inbox: AsyncInbox[HttpInbox] = AsyncInbox(boot.run_dir, name, HttpInbox)
    router, launcher = Outbox(boot.run_dir, "router"), Outbox(boot.run_dir, "launcher")
    front = _make_front_end(boot, index, router.send)
    app = build_app(front, api_key=boot.config.api_key, server_info=_server_info(boot))

    def started() -> None:
        freeze_garbage_collector()
        gc.set_threshold(*_GC_THRESHOLDS)
        launcher.send(ReadyMsg(name))

    def serving() -> None:
        launcher.send(ServingMsg(name))

    listener = socket.socket(fileno=boot.listen_fd)
    notice_lost_clients(listener)
    server = Server(uvicorn_config(app), started)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_end_with(Mailroom(front, inbox, serving), server))
        await server.serve(sockets=[listener])
    front.prompts.close()
    for link in (inbox, router, launcher):
        link.close()


class Server(uvicorn.Server):
    """uvicorn without its own ideas about signals: the launcher says when to end.

    Args:
        config: uvicorn's.
        started: Called once connections are accepted.
    """

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._started = started

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Leave the process's signal handlers as they are."""
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections, and say so."""
        await super().startup(sockets)
        self._started()


async def _end_with(mailroom: Mailroom, server: uvicorn.Server) -> None:
    await mailroom.run()
    server.should_exit = True


def _make_front_end(boot: Boot, index: int, send: Callable[[GenerateMsg | AbortMsg], None]) -> FrontEnd:
    status = Status(boot.max_req_total_len)
    metrics = Metrics()
    tokenizer = Tokenizer.load(Path(boot.tokenizer_dir))
    source = tokenizer.chat_template
    encode_chat = None if source is None else ChatTemplate(source, tokenizer).encode_chat
    return FrontEnd(
        model_name=boot.served_model_name,
        created=int(time.time()),
        status=status,
        streams=Streams(index, send, status, metrics, Pulse()),
        prompts=Prompts(tokenizer, encode_chat, boot.model.vocab_size, status),
        metrics=metrics,
    )


def _server_info(boot: Boot) -> dict[str, Any]:
    settings = dataclasses.asdict(boot.config)
    del settings["api_key"]
    resolved = {
        "device": boot.device,
        "chunked_prefill_size": boot.chunked_prefill_size,
        "batch_max_tokens": boot.batch_max_tokens,
    }
    model = {"architecture": boot.model.architecture, "vocab_size": boot.model.vocab_size}
    return {**settings, **resolved, "version": version("lightserve"), **model}


def uvicorn_config(app: FastAPI) -> uvicorn.Config:
    """Return how uvicorn serves ``app``."""
    return uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=CONNECT_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACEFUL_S,
    )
