"""Engines over tiny random models, and what transformers says of the same models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightserve.model_config import load_model_config
from lightserve.model_worker.engine import Engine
from lightserve.model_worker.loading import EngineLimits, load_model, make_engine
from lightserve.model_worker.models.llama import LlamaModel
from lightserve.model_worker.offline import OfflineBatch, OfflineReq
from lightserve.model_worker.tensor_parallel import Ranks, SingleRank
from lightserve.sampling_params import SamplingParams
from tests.model_worker.weights.tiny import CONFIG_CLASSES, MODEL_CLASSES

CPU = torch.device("cpu")
NUM_SLOTS = 1024
NUM_ROWS = 16
MAX_LEN = 256


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


def open_engine(
    folder: Path, *, ranks: Ranks | None = None, dtype: torch.dtype = torch.float32, vocab_size: int = 1 << 30
) -> Engine:
    """An engine over the model in ``folder``."""
    config = load_model_config(folder)
    model = load_model(config, ranks or SingleRank(), device=CPU, dtype=dtype, load_format="auto")
    limits = EngineLimits(NUM_SLOTS, NUM_ROWS, MAX_LEN, vocab_size)
    return make_engine(config, model, limits, device=CPU, dtype=dtype)


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    chunk: int = 512,
    slots: Sequence[int] | None = None,
) -> list[OfflineReq]:
    """Run prompts together; slots are scattered unless given."""
    order = np.random.default_rng(0).permutation(NUM_SLOTS) if slots is None else np.asarray(slots)
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    return OfflineBatch(engine, order.astype(np.int32), chunked_prefill_size=chunk).run(prompts, params)


def greedy(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int = 512) -> list[list[int]]:
    """Greedy ids of prompts run together."""
    reqs = generate(engine, prompts, SamplingParams(num_tokens, temperature=0.0), chunk=chunk)
    return [req.output_ids for req in reqs]


def random_prompts(lengths: Sequence[int], vocab_size: int = 131) -> list[list[int]]:
    """Prompts of these lengths."""
    generator = np.random.default_rng(1)
    return [generator.integers(3, vocab_size, length).tolist() for length in lengths]


def reference_greedy(model: Any, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy ids by transformers, and the logits after the prompt."""
    ids = list(prompt_ids)
    logits = []
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits.append(model(torch.tensor([ids])).logits[0, -1])
            ids.append(int(logits[-1].argmax()))
    return ids[len(prompt_ids) :], logits[0]


class RecordingModel(LlamaModel):
    """A model that keeps the logits it gives."""

    def __init__(self, model: LlamaModel) -> None:
        self.__dict__.update(model.__dict__)
        self.recorded: list[torch.Tensor] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states to logits, and keep them."""
        self.recorded.append(super().logits(hidden))
        return self.recorded[-1]


def first_logits(engine: Engine, prompt_ids: Sequence[int], *, chunk: int = 512) -> torch.Tensor:
    """[columns], logits after the prompt."""
    plain = engine.model
    engine.model = recording = RecordingModel(plain)
    greedy(engine, [prompt_ids], 1, chunk=chunk)
    engine.model = plain
    return recording.recorded[0][0]
