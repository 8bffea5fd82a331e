"""A whole server, as long as a block lasts."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from lightserve.children import describe_exit

# As we measure a server: random weights, and room for a whole trace at once.
BENCH_FLAGS = ("--load_format", "dummy", "--max_queued_reqs", "8192", "--httpserver_workers", "4")
_COMMAND = ("-m", "lightserve", "serve")
_START_LIMIT_S, _STOP_LIMIT_S = 180, 10
_READY = re.compile(r"lightserve is ready: .* on (http://\S+),")


class ServerDiedError(Exception):
    """The server ended before it was ready, or was not ready in time; its own message is on stderr."""


@dataclass(frozen=True)
class Server:
    """A server that is ready.

    Attributes:
        url: Where it serves.
        pid: Of its launcher, whose children the other processes are.
        start_s: From its start to being ready.
    """

    url: str
    pid: int
    start_s: float


@contextmanager
def running_server(
    flags: Sequence[str],
    environment: Mapping[str, str] = MappingProxyType({}),
    command: Sequence[str] = _COMMAND,
) -> Iterator[Server]:
    """Start a server on any free port and wait until it is ready; nothing of it survives the block.

    Args:
        flags: Beside the port's.
        environment: Added to this process's.
        command: Arguments to Python that start it; its standard input ends with this process.

    Raises:
        ServerDiedError: It did not become ready.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-P", *command, "--port", "0", *flags],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            url = _await_url(process)
            yield Server(url, process.pid, time.perf_counter() - start)
        finally:
            _stop(process)


def _await_url(process: "subprocess.Popen[str]") -> str:
    """Read where it serves; what it says of itself is no part of a script's answer, and goes to stderr."""
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        process.kill()

    limit = threading.Timer(_START_LIMIT_S, give_up)
    limit.start()
    try:
        for line in process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)
            if ready := _READY.search(line):
                return ready[1]
        status = process.wait()
    finally:
        limit.cancel()
    cause = f"was not ready within {_START_LIMIT_S} s" if is_late.is_set() else describe_exit(status)
    raise ServerDiedError(f"the server {cause}")


def _stop(process: "subprocess.Popen[str]") -> None:
    """Ask the server to end; one that takes long is killed, and its processes with it."""
    process.terminate()
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
