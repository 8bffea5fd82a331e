"""A whole server, started as users start it, under the load generator."""

import subprocess
import sys
import time
from pathlib import Path

from benchmark.endpoint import Endpoint, ServerError, ServerQueries

_PORT = 8123
_START_LIMIT_S = 120
_SCRIPTS = Path(__file__).resolve().parent.parent


def run_server(gguf: Path) -> bool:
    """Serve a model and send it 500 requests, 100 at a time; whether all were answered."""
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "lightserve", "serve", "--model_dir", str(gguf), "--port", str(_PORT)]
    )
    try:
        return _await_health(server) and _send_load()
    finally:
        server.terminate()
        server.wait()


def _await_health(server: "subprocess.Popen[bytes]") -> bool:
    deadline = time.monotonic() + _START_LIMIT_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with ServerQueries(Endpoint.parse(f"http://127.0.0.1:{_PORT}"), None) as queries:
                queries.get("/health")
            return True
        except (ServerError, OSError):
            time.sleep(0.2)
    return False


def _send_load() -> bool:
    command = [sys.executable, str(_SCRIPTS / "benchmark_sharegpt.py"), "--base_url", f"http://127.0.0.1:{_PORT}"]
    lengths = ["--prompt_len", "200", "--output_len", "100", "--num_prompts", "500", "--max_concurrency", "100"]
    return subprocess.run([*command, *lengths], check=False).returncode == 0
