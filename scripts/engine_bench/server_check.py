"""A whole server, started as users start it, under the load generator."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from benchmark.endpoint import Endpoint, ServerError, ServerQueries

# As we measure a server: random weights, and room for a whole trace at once.
BENCH_FLAGS = ("--load_format", "dummy", "--max_queued_reqs", "8192", "--httpserver_workers", "4")
_START_LIMIT_S = 180
_CLIENT = Path(__file__).resolve().parent.parent / "benchmark_sharegpt.py"
_STDERR = 2  # what the server says of itself is no part of a script's answer


class ServerDiedError(Exception):
    """The server ended, or was not ready in time."""


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


def run_server(gguf: Path) -> bool:
    """Serve a model and send it 500 requests, 100 at a time; whether all were answered."""
    lengths = ["--prompt_len", "200", "--output_len", "100", "--num_prompts", "500", "--max_concurrency", "100"]
    with running_server(["--model_dir", str(gguf)]) as server:
        command = [*_client_command(server.url), *lengths, "--max_failed_frac", "0"]
        return subprocess.run(command, check=False).returncode == 0


def send_load(url: str, flags: Sequence[str], report: Path) -> dict[str, Any]:
    """Run the load generator; failed requests are in its report like the others.

    Args:
        url: The server's.
        flags: Of the load.
        report: The file that it writes.

    Returns:
        What it wrote there.

    Raises:
        subprocess.CalledProcessError: The run could not be made.
    """
    report.unlink(missing_ok=True)
    command = [*_client_command(url), *flags, "--json", str(report)]
    status = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    if not report.exists():
        raise subprocess.CalledProcessError(status, command)
    return msgspec.json.decode(report.read_bytes(), type=dict[str, Any])


def _client_command(url: str) -> list[str]:
    return [sys.executable, "-P", str(_CLIENT), "--base_url", url]


@contextmanager
def running_server(flags: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[Server]:
    """Start a server, wait until it is ready, and end it.

    Args:
        flags: Beside the port's.
        environment: Added to this process's.

    Raises:
        ServerDiedError: It did not become ready.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-P", "-m", "lightserve", "serve", "--port", str(port), *flags]
    start = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=_STDERR)
    try:
        _await_health(process, url)
        yield Server(url, process.pid, time.perf_counter() - start)
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await_health(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with ServerQueries(Endpoint.parse(url), None) as queries:
                queries.get("/health")
            return
        except (ServerError, OSError):
            time.sleep(0.2)
    raise ServerDiedError(f"no server was ready after {_START_LIMIT_S} s (exit status {process.poll()})")
