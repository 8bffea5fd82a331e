"""Whole servers of which only the model worker is a fake."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from tests.fakes import FakeWorkerScript
from tests.server import Server, running

CHILDREN = ("model_worker-0", "router", "detokenizer", "http_server-0")
SERVE_FAKE_WORKER = str(Path(__file__).with_name("serve_fake_worker.py"))


def fake_server(
    model_dir: Path,
    *flags: str,
    script: FakeWorkerScript | None = None,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
) -> AbstractContextManager[Server]:
    """Run a server with a fake model worker."""
    command = [SERVE_FAKE_WORKER, "serve", "--model_dir", str(model_dir), "--load_format", "dummy", "--port", str(port)]
    script_environment = (script or FakeWorkerScript()).environment()
    return running([*command, *flags], {**script_environment, **(environment or {})})
