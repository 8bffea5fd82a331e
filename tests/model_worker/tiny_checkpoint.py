"""Tiny random checkpoints, written without the library that usually writes them: a GPU machine may lack it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lightserve.model_config import load_model_config
from lightserve.model_worker.weights.layout import allocate, pieces_of
from lightserve.model_worker.weights.sharding import Shard
from tests.model_worker.tiny_engine import MAX_LEN

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def write_checkpoint(folder: Path, architecture: str = "llama", **overrides: Any) -> None:
    """Write a model in float32 whose next ids are far apart to ``folder``."""
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "dtype": "float32",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 131,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    (folder / "config.json").write_text(json.dumps(values))
    config = load_model_config(folder)
    shard = Shard.of(config, 0, 1)
    weights = allocate(config, shard, torch.device("meta"), torch.float32)
    torch.manual_seed(0)
    tensors = {piece.name: _numbers(piece.name, piece.shape) for piece in pieces_of(weights, config, shard)}
    save_file(tensors, folder / "model.safetensors")


def _numbers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    is_norm = len(shape) == 1 and not name.endswith("bias")
    return torch.empty(shape).uniform_(0.5, 1.5) if is_norm else torch.randn(shape) * 0.2
