"""What tests of several folders share. Kernels are interpreted where there is no GPU.

That must be settled before the first import of triton.
"""

import os
import zlib
from pathlib import Path

import pytest
import torch

from lightserve.tokenizer import Tokenizer
from tests.tiny_model import make_model_folder
from tests.vocabularies import byte_level_folder, sentencepiece_folder

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def numbers_of_its_own(request: pytest.FixtureRequest) -> None:
    """Let a test draw the same numbers whatever ran before it."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_level_folder(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece")))
