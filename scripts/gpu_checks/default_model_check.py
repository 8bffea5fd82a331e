"""Greedy ids of one model on several devices."""

from pathlib import Path

import torch
from script_tools.greedy_ids import (
    MAX_LEN,
    NUM_ROWS,
    NUM_SLOTS,
    all_equal,
    encode_prompts,
    greedy_ids,
    open_cpu_engine,
    scattered_slots,
)

from lightserve.model_config import ModelConfig, load_model_config
from lightserve.model_worker.cuda.blueprint import CudaBlueprint, load_blueprint
from lightserve.model_worker.cuda.graph import CudaCapturer
from lightserve.model_worker.engine import Engine, Runner
from lightserve.model_worker.tensor_parallel import SingleRank

_CHUNK, _MAX_TOKENS = 100, 512


def compare_devices(gguf: Path) -> bool:
    """Compare CPU, GPU and GPU without graphs, in float32; say how many prompts get the same ids."""
    config = load_model_config(gguf)
    prompts = encode_prompts(gguf)

    def ids_of(engine: Engine[Runner]) -> list[list[int]]:
        return greedy_ids(engine, prompts, scattered_slots(), _CHUNK)

    with torch.inference_mode():
        expected = ids_of(open_cpu_engine(config))
        blueprint = _blueprint(config)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch gives it no types
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            found = {
                "GPU": ids_of(blueprint.build(NUM_SLOTS, CudaCapturer(stream))),
                "GPU without graphs": ids_of(blueprint.build(NUM_SLOTS, None)),
            }
    equal = [all_equal(name, ids, expected) for name, ids in found.items()]
    return all(equal)


def _blueprint(config: ModelConfig) -> CudaBlueprint:
    return load_blueprint(
        config,
        SingleRank(),
        num_rows=NUM_ROWS,
        max_tokens=_MAX_TOKENS,
        max_req_total_len=MAX_LEN,
        vocab_size=config.vocab_size,
        dtype=torch.float32,
        device=torch.device("cuda", 0),
        load_format="auto",
    )
