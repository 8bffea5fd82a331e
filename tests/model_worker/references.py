"""Tiny random transformers models, and what they generate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.model_worker.tiny_engine import MAX_LEN
from tests.model_worker.weights.tiny import CONFIG_CLASSES, MODEL_CLASSES


def make_reference(architecture: str, folder: Path, **overrides: Any) -> Any:
    """A random transformers model in float32 whose next ids are far apart, saved to ``folder``."""
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "max_position_embeddings": MAX_LEN,
        "head_dim": 16,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    torch.manual_seed(0)
    model = MODEL_CLASSES[architecture](CONFIG_CLASSES[architecture](**values)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2) if parameter.dim() > 1 or "bias" in name else parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def reference_greedy(model: Any, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy ids by transformers, and the logits after the prompt."""
    ids = list(prompt_ids)
    logits = []
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits.append(model(torch.tensor([ids])).logits[0, -1])
            ids.append(int(logits[-1].argmax()))
    return ids[len(prompt_ids) :], logits[0]
