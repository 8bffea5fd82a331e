from pathlib import Path

import pytest

from tests.tiny_model import make_model_folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "tiny")
