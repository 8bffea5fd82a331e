from pathlib import Path

import msgspec
import pytest

from lightserve.dummy_tokenizer import write_dummy_tokenizer
from lightserve.errors import ConfigError
from lightserve.model_config import ModelConfig, load_model_config
from lightserve.tokenizer import Tokenizer

PRESET = Path(__file__).parents[2] / "scripts" / "presets" / "llama-3.1-8b"


def config_of(vocab_size: int, eos_token_ids: tuple[int, ...] = (3,), bos_token_id: int | None = 1) -> ModelConfig:
    preset = load_model_config(PRESET, "dummy")
    return msgspec.structs.replace(
        preset, vocab_size=vocab_size, eos_token_ids=eos_token_ids, bos_token_id=bos_token_id
    )


def make(config: ModelConfig, folder: Path) -> Tokenizer:
    write_dummy_tokenizer(config, folder)
    return Tokenizer.load(folder)


def test_every_id_has_text_of_its_own(tmp_path: Path) -> None:
    tokenizer = make(config_of(13_000), tmp_path)
    assert tokenizer.vocab_size == 13_000
    texts = {tokenizer.bytes_table[token_id] for token_id in range(13_000)}
    assert len(texts) == 13_000
    assert b"" not in texts


def test_any_text_makes_the_round_trip_one_id_per_byte(tmp_path: Path) -> None:
    tokenizer = make(config_of(1_000), tmp_path)
    text = "Hello  wörld\n\t世界 🎉"
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_models_end_and_begin_are_special_tokens(tmp_path: Path) -> None:
    tokenizer = make(config_of(1_000, eos_token_ids=(3, 999), bos_token_id=1), tmp_path)
    assert tokenizer.special_ids == {1, 3, 999}
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|end_3|>")
    assert tokenizer.chat_template


def test_a_model_without_begin_or_end_has_a_tokenizer_too(tmp_path: Path) -> None:
    tokenizer = make(config_of(256, eos_token_ids=(), bos_token_id=None), tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.vocab_size) == (None, None, 256)


def test_a_vocabulary_without_room_for_all_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocabulary of 257 is too small.*--tokenizer"):
        write_dummy_tokenizer(config_of(257), tmp_path)
