"""One server for all tests of this folder; each test finds it idle, with the default script. Or one of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lightserve.http_server.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def shared_server(model_dir: Path) -> Iterator[LiveServer]:
    with live_server(model_dir) as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    yield shared_server
    shared_server.until_idle()
    shared_server.engine.reset()


@pytest.fixture
def fresh_server(model_dir: Path) -> Iterator[LiveServer]:
    with live_server(model_dir) as server:
        yield server
