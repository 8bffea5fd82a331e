"""Compare the model worker with Hugging Face transformers on one .gguf file, in float32 on the CPU.

Greedy ids of several prompts must be equal, run one by one and in one mixed batch with chunked prefill and scattered
slots, and the logits after every prompt must agree to 1e-3. Takes a few minutes; needs transformers and accelerate.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import numpy as np
import torch
from script_tools.flags import input_file, lacking
from script_tools.greedy_ids import (
    NUM_SLOTS,
    NUM_TOKENS,
    all_equal,
    encode_prompts,
    greedy_ids,
    open_cpu_engine,
    scattered_slots,
)
from script_tools.recording_model import RecordingModel

from lightserve.default_model import fetch_default_model
from lightserve.errors import ConfigError
from lightserve.model_config import load_model_config
from lightserve.model_worker.cpu.runner import CpuEngine

LOGITS_TOLERANCE = 1e-3


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", nargs="?", type=input_file, help="unset: the default model, fetched once")
    options = parser.parse_args(arguments)
    if problem := lacking("transformers", "accelerate"):
        print(f"check_against_transformers.py: {problem}", file=sys.stderr)
        return 2
    try:
        gguf = options.gguf or fetch_default_model()
        config = load_model_config(gguf)
    except ConfigError as error:
        print(f"check_against_transformers.py: {error}", file=sys.stderr)
        return 2
    prompts = encode_prompts(gguf)
    expected_ids, expected_logits = _run_transformers(gguf, prompts)

    engine = open_cpu_engine(config)
    alone, logits = run_one_by_one(engine, prompts)
    together = greedy_ids(engine, prompts, scattered_slots(), 48)
    worst = max(float((a - b).abs().max()) for a, b in zip(logits, expected_logits, strict=True))
    print(f"logits after each prompt differ by at most {worst:.2e}")
    found = {"one by one": alone, "in one batch": together}
    equal = [all_equal(name, ids, expected_ids) for name, ids in found.items()]
    return 0 if worst <= LOGITS_TOLERANCE and all(equal) else 1


def _run_transformers(gguf: Path, prompts: list[list[int]]) -> tuple[list[list[int]], list[torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # run on beyond the end, as ours does
    ids, logits = [], []
    for prompt_ids in prompts:
        inputs = torch.tensor([prompt_ids])
        with torch.inference_mode():
            logits.append(model(inputs).logits[0, -1])
        generated = model.generate(inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
        ids.append(generated[0, len(prompt_ids) :].tolist())
    return ids, logits


def run_one_by_one(engine: CpuEngine, prompts: list[list[int]]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Run each prompt alone, in neighbouring slots; return what follows it, and the logits after it."""
    model = engine.runner.model = RecordingModel(engine.runner.model)
    ids, logits = [], []
    for prompt_ids in prompts:
        model.recorded.clear()
        ids += greedy_ids(engine, [prompt_ids], np.arange(NUM_SLOTS, dtype=np.int32), 512)
        logits.append(model.recorded[0][0])
    return ids, logits


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
