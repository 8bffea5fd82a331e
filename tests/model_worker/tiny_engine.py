"""Engines over tiny models, without a router."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lightserve.model_config import load_model_config
from lightserve.model_worker.cpu.loading import EngineLimits, load_cpu_model, make_cpu_engine
from lightserve.model_worker.cpu.runner import CpuEngine
from lightserve.model_worker.engine import Engine, Runner
from lightserve.model_worker.offline import OfflineBatch, OfflineReq
from lightserve.model_worker.tensor_parallel import Ranks, SingleRank
from lightserve.sampling_params import SamplingParams

CPU = torch.device("cpu")
NUM_SLOTS = 1024
NUM_ROWS = 16
MAX_LEN = 256


def open_engine(
    folder: Path, *, ranks: Ranks | None = None, dtype: torch.dtype = torch.float32, vocab_size: int = 1 << 30
) -> CpuEngine:
    """An engine over the model in ``folder``."""
    config = load_model_config(folder)
    model = load_cpu_model(config, ranks or SingleRank(), dtype=dtype, load_format="auto")
    limits = EngineLimits(NUM_SLOTS, NUM_ROWS, MAX_LEN, vocab_size)
    return make_cpu_engine(config, model, limits, dtype=dtype)


def generate(
    engine: Engine[Runner],
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


def greedy(
    engine: Engine[Runner], prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int = 512
) -> list[list[int]]:
    """Greedy ids of prompts run together."""
    reqs = generate(engine, prompts, SamplingParams(num_tokens, temperature=0.0), chunk=chunk)
    return [req.output_ids for req in reqs]


def random_prompts(lengths: Sequence[int], vocab_size: int = 131) -> list[list[int]]:
    """Prompts of these lengths."""
    generator = np.random.default_rng(1)
    return [generator.integers(3, vocab_size, length).tolist() for length in lengths]
