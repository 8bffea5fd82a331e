import pytest

from lightserve.detokenizer.answer import AnswerFactory
from lightserve.detokenizer.incremental import TextTables
from lightserve.tokenizer import Tokenizer
from tests.vocabularies import byte_level_folder, sentencepiece_folder


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_level_folder(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(scope="session")
def answers(byte_level: Tokenizer) -> AnswerFactory:
    return AnswerFactory(TextTables(byte_level), byte_level.special_id_of)
