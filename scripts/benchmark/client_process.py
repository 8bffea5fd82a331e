"""A client process: its job comes on stdin, what became of it goes to stdout. Ends when stdin does."""

import asyncio
import gc
import os
import resource
import signal
import sys
import time

import msgspec
import uvloop

from benchmark.client import Client
from benchmark.messages import Finished, Job, Progress, Ready, Start, frame, read_frame

_PROGRESS_INTERVAL_S = 1.0


async def _serve_command() -> None:
    reader = await _open_stdin()
    job = msgspec.msgpack.decode(await read_frame(reader), type=Job)
    num_ended = 0

    def count() -> None:
        nonlocal num_ended
        num_ended += 1

    client = Client(job, count)
    gc.collect()
    gc.freeze()
    _write(Ready())
    start = msgspec.msgpack.decode(await read_frame(reader), type=Start)

    async def tell_progress() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
            _write(Progress(num_ended))

    telling = asyncio.create_task(tell_progress())
    orphaned = asyncio.create_task(_exit_with_command(reader))
    cpu_before_s = time.process_time()
    outcomes = await client.run(start.at_s)
    cpu_s = time.process_time() - cpu_before_s
    telling.cancel()
    orphaned.cancel()
    _write(Finished(outcomes, cpu_s))


async def _exit_with_command(reader: asyncio.StreamReader) -> None:
    await reader.read()
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's
    _allow_many_sockets()
    uvloop.run(_serve_command())
