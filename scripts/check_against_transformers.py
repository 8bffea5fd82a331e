"""Compare the model worker with Hugging Face transformers on one .gguf file, in float32 on the CPU.

Greedy ids of several prompts must be equal, run one by one and in one mixed batch with chunked prefill and scattered
slots, and the logits after every prompt must agree to 1e-3. Takes a few minutes; needs transformers and accelerate.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import numpy as np
import torch
from script_tools.recording_model import RecordingModel

from lightserve.boot import Boot
from lightserve.config import ServerConfig
from lightserve.default_model import fetch_default_model
from lightserve.gguf_tokenizer import export_gguf_tokenizer
from lightserve.model_config import load_model_config
from lightserve.model_worker.cpu.loading import load_cpu_engine
from lightserve.model_worker.cpu.runner import CpuEngine
from lightserve.model_worker.engine import Engine, Runner
from lightserve.model_worker.offline import OfflineBatch
from lightserve.sampling_params import SamplingParams
from lightserve.tokenizer import Tokenizer

PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a short poem about the sea.",
    "Once upon a time",
    "def fibonacci(n):\n",
    "The three laws of robotics are",
    "蓝天 und Grüße: explain these words.",
    "List the first ten prime numbers, then their squares, and say what you notice about the last digits.",
    "Summarise: " + "The quick brown fox jumps over the lazy dog. " * 12,
)
NUM_TOKENS = 64
LOGITS_TOLERANCE = 1e-3
POOL = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", nargs="?", type=Path, help="unset: the default model, fetched once")
    gguf = parser.parse_args().gguf or fetch_default_model()
    with tempfile.TemporaryDirectory() as folder:
        export_gguf_tokenizer(gguf, Path(folder))
        tokenizer = Tokenizer.load(Path(folder))
        engine = load_cpu_engine(_boot(gguf, folder), rank=0).engine
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS]
    expected_ids, expected_logits = _run_transformers(gguf, prompts)

    alone, logits = _run_one_by_one(engine, prompts)
    together = _generate(engine, prompts, np.random.default_rng(0).permutation(POOL).astype(np.int32), 48)
    worst = max(float((a - b).abs().max()) for a, b in zip(logits, expected_logits, strict=True))
    print(f"logits after each prompt differ by at most {worst:.2e}")
    ok = worst <= LOGITS_TOLERANCE
    for name, ids in (("one by one", alone), ("in one batch", together)):
        equal = [ours == theirs for ours, theirs in zip(ids, expected_ids, strict=True)]
        print(f"greedy ids {name}: {sum(equal)} of {len(equal)} prompts equal over {NUM_TOKENS} tokens")
        ok &= all(equal)
    return 0 if ok else 1


def _boot(gguf: Path, tokenizer_dir: str) -> Boot:
    return Boot(
        config=ServerConfig(model_dir=str(gguf), device="cpu", dtype="float32", max_total_token_num=POOL),
        model=load_model_config(gguf),
        run_dir=tokenizer_dir,
        tokenizer_dir=tokenizer_dir,
        served_model_name="",
        listen_fd=-1,
        device="cpu",
        max_req_total_len=POOL,
        chunked_prefill_size=512,
        batch_max_tokens=1024,
    )


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


def _run_one_by_one(engine: CpuEngine, prompts: list[list[int]]) -> tuple[list[list[int]], list[torch.Tensor]]:
    model = engine.runner.model = RecordingModel(engine.runner.model)
    ids, logits = [], []
    for prompt_ids in prompts:
        model.recorded.clear()
        ids += _generate(engine, [prompt_ids], np.arange(POOL, dtype=np.int32), 512)
        logits.append(model.recorded[0][0])
    return ids, logits


def _generate(engine: Engine[Runner], prompts: list[list[int]], slots: np.ndarray, chunk: int) -> list[list[int]]:
    sampling = [SamplingParams(NUM_TOKENS, temperature=0.0)] * len(prompts)
    reqs = OfflineBatch(engine, slots, chunked_prefill_size=chunk).run(prompts, sampling)
    return [req.output_ids for req in reqs]


if __name__ == "__main__":
    sys.exit(main())
