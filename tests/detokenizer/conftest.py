import pytest

from lightserve.detokenizer.answer import AnswerFactory
from lightserve.detokenizer.incremental import TextTables
from lightserve.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def answers(byte_level: Tokenizer) -> AnswerFactory:
    return AnswerFactory(TextTables(byte_level), byte_level.special_id_of)
