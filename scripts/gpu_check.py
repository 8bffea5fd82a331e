#!/usr/bin/env python3
"""Check on a machine with a GPU all that a machine without one cannot.

    gpu_check.py [--gguf FILE] [--only kernels,engine,model,pressure,memory,server]

kernels   every kernel against its reference
engine    the engine on tiny models against the CPU's, with and without CUDA graphs
model     greedy ids of the default model in float32: CPU, GPU, GPU without graphs
pressure  many requests of mixed lengths, some of whose clients leave, through a pool that is always full: each gets the
          ids that it gets alone
memory    the largest steps there can be, every way of sampling, in the pool that the engine chose for itself
server    a whole server under load: no request fails
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from engine_bench.default_model_check import compare_devices
from engine_bench.engine_host import Work, open_engine
from engine_bench.server_check import run_server

from lightserve.config import ServerConfig
from lightserve.default_model import fetch_default_model
from lightserve.sampling_params import SamplingParams

_ROOT = Path(__file__).resolve().parent.parent
_PRESET = _ROOT / "scripts" / "presets" / "llama-3.2-1b"


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    gguf: Path = options.gguf or fetch_default_model()
    checks: dict[str, Callable[[], bool]] = {
        "kernels": lambda: _run_tests("tests/kernels"),
        "engine": lambda: _run_tests("tests/model_worker/test_cuda_engine.py"),
        "model": lambda: compare_devices(gguf),
        "pressure": lambda: _press(gguf, options.num_requests),
        "memory": _fill_memory,
        "server": lambda: run_server(gguf),
    }
    failed = [name for name in options.only or checks if not _report(name, checks[name])]
    print("failed: " + ", ".join(failed) if failed else "all checks passed")
    return 1 if failed else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="unset: the default model, fetched once")
    parser.add_argument("--only", type=lambda text: text.split(","), help="some of the checks, by name")
    parser.add_argument("--num_requests", type=int, default=2000, help="of the pressure check")
    return parser.parse_args(arguments)


def _report(name: str, check: Callable[[], bool]) -> bool:
    start = time.monotonic()
    passed = check()
    print(f"== {name}: {'passed' if passed else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
    return passed


def _run_tests(path: str) -> bool:
    # Without the project's settings: a GPU machine need not have every plugin that they name.
    options = ["-c", "/dev/null", f"--rootdir={_ROOT}", "--import-mode=importlib", "-p", "no:cacheprovider", "-q"]
    command = [sys.executable, "-P", "-m", "pytest", *options, str(_ROOT / path)]
    return subprocess.run(command, check=False).returncode == 0


def _press(gguf: Path, num_requests: int) -> bool:
    """Run requests one by one, then all at once through a pool that holds a few dozen."""
    random = np.random.default_rng(0)
    works = [
        Work(
            random.integers(10, 40_000, random.integers(1, 200)).tolist(),
            int(random.integers(1, 40)),
            abort_after=int(random.integers(1, 20)) if random.random() < 0.2 else 0,
        )
        for _ in range(num_requests)
    ]
    config = ServerConfig(
        model_dir=str(gguf),
        dtype="float32",
        max_total_token_num=6000,
        running_max_req_size=64,
        chunked_prefill_size=256,
    )
    with open_engine(config) as host:
        host.run(works)
        crowd = host.outputs
        alone = []
        for work in works:
            host.run([Work(work.prompt_ids, work.output_len)])
            alone.append(host.outputs[0])
    lengths = [work.abort_after or work.output_len for work in works]
    complete = sum(len(ids) >= min(n, len(b)) for ids, b, n in zip(crowd, alone, lengths, strict=True))
    equal = sum(ids == b[: len(ids)] for ids, b in zip(crowd, alone, strict=True))
    print(f"{num_requests} requests: {complete} complete, {equal} with the ids they get alone")
    return complete == equal == num_requests


def _fill_memory() -> bool:
    """Keep every row decoding, penalised and drawn, while prompts of the largest chunk come in."""
    config = ServerConfig(model_dir=str(_PRESET), load_format="dummy")
    random = np.random.default_rng(0)
    picky = SamplingParams(1, temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.1, ignore_eos=True)
    with open_engine(config) as host:
        print(host.note)
        before = host.stats().gpu_reserved_bytes
        small = [Work(random.integers(10, 100_000, 16).tolist(), 60, picky) for _ in range(1000)]
        large = [Work(random.integers(10, 100_000, 32_000).tolist(), 4, picky) for _ in range(8)]
        host.run([*small, *large])
        grown = host.stats().gpu_reserved_bytes - before
    print(f"memory grew by {grown / 2**20:.0f} MiB")
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
