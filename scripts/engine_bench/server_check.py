"""A whole server, started as users start it, under the load generator."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmark.endpoint import Endpoint, ServerError, ServerQueries

_PORT = 8123
_URL = f"http://127.0.0.1:{_PORT}"
_START_LIMIT_S = 180
_CLIENT = Path(__file__).resolve().parent.parent / "benchmark_sharegpt.py"


class ServerDiedError(Exception):
    """The server ended, or was not ready in time."""


def run_server(gguf: Path) -> bool:
    """Serve a model and send it 500 requests, 100 at a time; whether all were answered."""
    lengths = ["--prompt_len", "200", "--output_len", "100", "--num_prompts", "500", "--max_concurrency", "100"]
    with running_server(["--model_dir", str(gguf)]):
        return subprocess.run([*client_command(), *lengths, "--max_failed_frac", "0"], check=False).returncode == 0


def client_command() -> list[str]:
    """Give the start of a command line of the load generator."""
    return [sys.executable, "-P", str(_CLIENT), "--base_url", _URL]


@contextmanager
def running_server(flags: Sequence[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a server, wait until it is ready, and end it.

    Raises:
        ServerDiedError: It did not become ready.
    """
    command = [sys.executable, "-P", "-m", "lightserve", "serve", "--port", str(_PORT), *flags]
    server = subprocess.Popen(command)
    try:
        _await_health(server)
        yield server
    finally:
        server.terminate()
        server.wait()


def _await_health(server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with ServerQueries(Endpoint.parse(_URL), None) as queries:
                queries.get("/health")
            return
        except (ServerError, OSError):
            time.sleep(0.2)
    raise ServerDiedError(f"no server was ready after {_START_LIMIT_S} s (exit status {server.poll()})")
