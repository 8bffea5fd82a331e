"""Tensor parallel: two ranks give the greedy ids that one gives."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from engine_bench.engine_host import Work, open_engine
from script_tools.plain_ids import draw_ids
from script_tools.random_checkpoint import spread_numbers, write_checkpoint

from gpu_checks.requirements import require_gpus
from lightserve.config import ServerConfig
from lightserve.dummy_tokenizer import write_dummy_tokenizer
from lightserve.model_config import load_model_config

_NUM_RANKS = 2
# Query and key/value heads: each rank gets its own, or both get the one there is.
_HEADS = ((4, 2), (6, 1), (14, 2))
_PROMPT_LENS = (1, 5, 17, 64, 300, 700)
_CHUNK = 256
_NUM_TOKENS = 48


def compare_ranks() -> bool:
    """Compare random models in float32; say for each how many prompts get the same ids.

    The default model is not among them: its 9 query and 3 key/value heads do not divide by two.

    Raises:
        NotRunError: There are fewer than two GPUs.
    """
    require_gpus(_NUM_RANKS)
    with tempfile.TemporaryDirectory() as folder:
        equal = [compare_model(write_tiny(Path(folder), heads)) for heads in _HEADS]
    return all(equal)


def write_tiny(folder: Path, heads: tuple[int, int]) -> Path:
    """Write a random model with so many query and key/value heads into a new folder in ``folder``."""
    num_heads, num_kv_heads = heads
    path = folder / f"{num_heads}-{num_kv_heads}"
    path.mkdir()
    values = {
        "architectures": ["Qwen2ForCausalLM"],  # the one with biases
        "model_type": "qwen2",
        "dtype": "float32",
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 64,
        "vocab_size": 1003,  # the last rank's part of the table has a row that no id has
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    write_checkpoint(path, values, spread_numbers(), dtype=torch.float32, max_file_bytes=1 << 30)
    write_dummy_tokenizer(load_model_config(path), path)
    return path


def compare_model(path: Path, device: str = "auto") -> bool:
    """Compare one model's ids; say how many prompts get the same from one rank and from two."""
    one, two = (_ids_of(path, tp, device) for tp in (1, _NUM_RANKS))
    equal = sum(a == b for a, b in zip(one, two, strict=True))
    print(f"{path.name}: {equal} of {len(one)} prompts get from {_NUM_RANKS} ranks the {_NUM_TOKENS} ids of one")
    return equal == len(one)


def _ids_of(path: Path, tp: int, device: str) -> Sequence[Sequence[int]]:
    config = ServerConfig(
        model_dir=str(path),
        dtype="float32",
        tp=tp,
        device=device,  # type: ignore[arg-type]  # one of its choices
        max_total_token_num=4096,
        running_max_req_size=8,
        chunked_prefill_size=_CHUNK,
    )
    random = np.random.default_rng(0)
    with open_engine(config) as host:
        vocab_size = host.boot.model.vocab_size
        host.run([Work(draw_ids(random, vocab_size, length).tolist(), _NUM_TOKENS) for length in _PROMPT_LENS])
        return host.outputs
