"""Greedy ids of one model's prompts, for comparing engines: equal ids show that they compute the same."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lightserve.gguf_tokenizer import export_gguf_tokenizer
from lightserve.model_config import ModelConfig
from lightserve.model_worker.cpu.loading import EngineLimits, load_cpu_model, make_cpu_engine
from lightserve.model_worker.cpu.runner import CpuEngine
from lightserve.model_worker.engine import Engine, Runner
from lightserve.model_worker.offline import OfflineBatch
from lightserve.model_worker.tensor_parallel import SingleRank
from lightserve.router.arrays import SlotArray
from lightserve.sampling_params import SamplingParams
from lightserve.tokenizer import Tokenizer

NUM_TOKENS, NUM_SLOTS, NUM_ROWS, MAX_LEN = 64, 4096, 8, 2048
_PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a short poem about the sea.",
    "Once upon a time",
    "def fibonacci(n):\n",
    "The three laws of robotics are",
    "蓝天 und Grüße: explain these words.",
    "List the first ten prime numbers, then their squares, and say what you notice about the last digits.",
    "Summarise: " + "The quick brown fox jumps over the lazy dog. " * 12,
)


def encode_prompts(gguf: Path) -> list[list[int]]:
    """Encode prompts of several kinds and lengths, no more than there are rows, by a model's own tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        export_gguf_tokenizer(gguf, Path(folder))
        tokenizer = Tokenizer.load(Path(folder))
        return [tokenizer.encode(text, add_special_tokens=True) for text in _PROMPTS]


def open_cpu_engine(config: ModelConfig) -> CpuEngine:
    """Load a model in float32 for the CPU."""
    model = load_cpu_model(config, SingleRank(), dtype=torch.float32, load_format="auto")
    limits = EngineLimits(NUM_SLOTS, NUM_ROWS, MAX_LEN, config.vocab_size)
    return make_cpu_engine(config, model, limits, dtype=torch.float32)


def scattered_slots() -> SlotArray:
    """Return all slots, [NUM_SLOTS], neighbours far apart."""
    return np.random.default_rng(0).permutation(NUM_SLOTS).astype(np.int32)


def greedy_ids(
    engine: Engine[Runner], prompts: Sequence[Sequence[int]], slots: SlotArray, chunked_prefill_size: int
) -> list[list[int]]:
    """Run prompts together; return what follows each."""
    sampling = [SamplingParams(NUM_TOKENS, temperature=0.0)] * len(prompts)
    reqs = OfflineBatch(engine, slots, chunked_prefill_size=chunked_prefill_size).run(prompts, sampling)
    return [req.output_ids for req in reqs]


def all_equal(name: str, ids: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> bool:
    """Say after how many prompts the ids are those expected; whether after all."""
    equal = sum(ours == theirs for ours, theirs in zip(ids, expected, strict=True))
    print(f"{name}: {equal} of {len(expected)} prompts get the {NUM_TOKENS} ids expected")
    return equal == len(expected)
