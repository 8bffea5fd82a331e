"""Greedy ids of one model on several devices."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lightserve.gguf_tokenizer import export_gguf_tokenizer
from lightserve.model_config import ModelConfig, load_model_config
from lightserve.model_worker.cpu.loading import EngineLimits, load_cpu_model, make_cpu_engine
from lightserve.model_worker.cuda.blueprint import CudaBlueprint, load_blueprint
from lightserve.model_worker.cuda.graph import CudaCapturer
from lightserve.model_worker.engine import Engine, Runner
from lightserve.model_worker.offline import OfflineBatch
from lightserve.model_worker.tensor_parallel import SingleRank
from lightserve.sampling_params import SamplingParams
from lightserve.tokenizer import Tokenizer

_PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a short poem about the sea.",
    "def fibonacci(n):\n",
    "Summarise: " + "The quick brown fox jumps over the lazy dog. " * 12,
)
_NUM_TOKENS, _NUM_SLOTS, _NUM_ROWS, _MAX_LEN = 64, 4096, 8, 2048
_MAX_TOKENS = 512


def compare_devices(gguf: Path) -> bool:
    """Compare CPU, GPU and GPU without graphs, in float32; say how many prompts get the same ids."""
    config = load_model_config(gguf)
    prompts = _encode(gguf)
    with torch.inference_mode():
        expected = _generate(_cpu_engine(config), prompts)
        blueprint = _blueprint(config)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch gives it no types
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            found = {
                "GPU": _generate(blueprint.build(_NUM_SLOTS, CudaCapturer(stream)), prompts),
                "GPU without graphs": _generate(blueprint.build(_NUM_SLOTS, None), prompts),
            }
    for name, ids in found.items():
        equal = sum(a == b for a, b in zip(ids, expected, strict=True))
        print(f"{name}: {equal} of {len(prompts)} prompts get the CPU's {_NUM_TOKENS} ids")
    return all(ids == expected for ids in found.values())


def _encode(gguf: Path) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        export_gguf_tokenizer(gguf, Path(folder))
        tokenizer = Tokenizer.load(Path(folder))
        return [tokenizer.encode(text, add_special_tokens=True) for text in _PROMPTS]


def _cpu_engine(config: ModelConfig) -> Engine[Runner]:
    model = load_cpu_model(config, SingleRank(), dtype=torch.float32, load_format="auto")
    limits = EngineLimits(_NUM_SLOTS, _NUM_ROWS, _MAX_LEN, config.vocab_size)
    return make_cpu_engine(config, model, limits, dtype=torch.float32)


def _blueprint(config: ModelConfig) -> CudaBlueprint:
    return load_blueprint(
        config,
        SingleRank(),
        num_rows=_NUM_ROWS,
        max_tokens=_MAX_TOKENS,
        max_req_total_len=_MAX_LEN,
        vocab_size=config.vocab_size,
        dtype=torch.float32,
        device=torch.device("cuda", 0),
        load_format="auto",
    )


def _generate(engine: Engine[Runner], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    slots = np.random.default_rng(0).permutation(_NUM_SLOTS).astype(np.int32)
    sampling = [SamplingParams(_NUM_TOKENS, temperature=0.0)] * len(prompts)
    reqs = OfflineBatch(engine, slots, chunked_prefill_size=100).run(prompts, sampling)
    return [req.output_ids for req in reqs]
