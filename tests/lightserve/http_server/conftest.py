"""One server for all tests of this folder; each test finds it idle, with the default script."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lightserve.http_server.live_server import LiveServer, live_server
from tests.tiny_model import make_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def shared_server(model_folder: Path) -> Iterator[LiveServer]:
    with live_server(model_folder) as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    yield shared_server
    shared_server.until_idle()
    shared_server.engine.reset()
