"""The HTTP server process: uvicorn on the inherited socket, one inbox, one outbox.

``python -P -m lightserve.http_server.process RUN_DIR INDEX``. It listens at once and answers 503 until ``ServeMsg``.
``DrainMsg``: what is new is refused, what is open may finish, then it ends. ``DownMsg``: what is open ends with an
error.
"""

import asyncio
import os
import resource
from pathlib import Path

import uvloop

from lightserve.boot import read_boot
from lightserve.child import run_child

_OPEN_FILES = 65_536


def main(run_dir: str, index: int) -> None:
    """Run the process until the launcher ends it."""
    _allow_many_connections()
    # prometheus_client decides where numbers live when it is imported: the import below must come after this.
    metrics_dir = Path(run_dir, "metrics")
    metrics_dir.mkdir(mode=0o700, exist_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics_dir)
    from lightserve.http_server.server import serve

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(read_boot(run_dir), index))


def _allow_many_connections() -> None:
    """Raise the bound on open files, 1,024 on most systems, as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if resource.RLIM_INFINITY != soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    run_child("http_server", main)
