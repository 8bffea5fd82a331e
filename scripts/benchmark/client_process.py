"""A client process: its job comes on stdin, what became of it goes to stdout. Ends when stdin does."""

import asyncio
import gc
import os
import resource
import sys
import time
from contextlib import suppress

import msgspec
import uvloop

from benchmark.client import Client
from benchmark.messages import Finished, Job, Ready, Start, Stop, frame, read_frame

_PROGRESS_INTERVAL_S = 1.0


async def _serve_command() -> None:
    reader = await _open_stdin()
    job = msgspec.msgpack.decode(await read_frame(reader), type=Job)
    client = Client(job)
    gc.collect()
    gc.freeze()
    _write(Ready())
    start = msgspec.msgpack.decode(await read_frame(reader), type=Start)

    async def tell_progress() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
            _write(client.progress)

    telling = asyncio.create_task(tell_progress())
    cpu_before_s = time.process_time()
    running = asyncio.create_task(client.run(start.at_s))
    listening = asyncio.create_task(_obey(reader, running))
    with suppress(asyncio.CancelledError):
        await running
    cpu_s = time.process_time() - cpu_before_s
    telling.cancel()
    listening.cancel()
    _write(Finished(client.outcomes, cpu_s))


async def _obey(reader: asyncio.StreamReader, running: "asyncio.Task[None]") -> None:
    """End the load when the command says so, and the process when the command has gone."""
    try:
        msgspec.msgpack.decode(await read_frame(reader), type=Stop)
        running.cancel()
        await reader.read()
    except asyncio.IncompleteReadError:
        pass
    os._exit(1)  # the command has gone: nobody wants the rest of the load


async def _open_stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _write(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(frame(message))
    sys.stdout.buffer.flush()


def _allow_many_sockets() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    _allow_many_sockets()
    uvloop.run(_serve_command())
