"""A whole server around a modelled worker, as long as a block lasts."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from front_end_bench.scenario import FILLING_STEP_S, Scenario
from front_end_bench.worker_process import WorkerPace

_SCRIPTS = Path(__file__).resolve().parent.parent
_STOP_LIMIT_S = 10
_READY = re.compile(r"lightserve is ready: .* on (http://\S+),")


class ServerDiedError(Exception):
    """The server ended before it was ready; its own message is on stderr."""


@dataclass(frozen=True)
class Server:
    """A server that is ready.

    Attributes:
        url: Where it serves.
        pid: Of its launcher, whose children the other processes are.
    """

    url: str
    pid: int


@contextmanager
def running_server(scenario: Scenario, flags: Sequence[str]) -> Iterator[Server]:
    """Start a server for a scenario; nothing of it survives the block.

    Raises:
        ServerDiedError: It does not start.
    """
    pace = WorkerPace(scenario.step_s, scenario.num_full, FILLING_STEP_S)
    process = subprocess.Popen(
        [sys.executable, "-P", *_command(pace), *_flags(scenario), *flags],
        env=os.environ | {"PYTHONPATH": _python_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Server(_await_url(process), process.pid)
    finally:
        _stop(process)


def _command(pace: WorkerPace) -> list[str]:
    return ["-m", "front_end_bench.serve_modelled_worker", msgspec.json.encode(pace).decode(), "serve"]


def _flags(scenario: Scenario) -> list[str]:
    settings = {
        "port": 0,
        "device": "cpu",  # so that no GPU is looked for
        "load_format": "dummy",
        "log_level": "warning",
        "drain_timeout_s": 0,
        "max_total_token_num": scenario.max_total_token_num,
        "running_max_req_size": scenario.num_running,
        "max_queued_reqs": len(scenario.lengths),
        "chunked_prefill_size": 8192,
    }
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(_SCRIPTS), os.environ.get("PYTHONPATH")]))


def _await_url(process: "subprocess.Popen[str]") -> str:
    for line in process.stdout or ():
        ready = _READY.search(line)
        if ready is not None:
            return ready[1]
    raise ServerDiedError(f"the server ended with status {process.wait()} before it was ready")


def _stop(process: "subprocess.Popen[str]") -> None:
    """End the server as the end of its standard input does, or at once if that takes long."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
