"""Time the model's part of a step by itself, as captured graphs on a CUDA device, and show where the time goes.

    bench_model.py --model_dir scripts/presets/llama-3.1-8b --decodes 1,4,8,16,64 --context 576 --mixed 3+100,3+250 \\
        [--kernels 4,3+100] [--json out.json]

Weights are random, in bfloat16, whatever the folder holds beside its config.json; slots are random too. "3+100" is
three decode rows and a prompt of 100 tokens. Times are medians of replays after a warm-up. With --kernels a step is
traced, and each kernel is given the time from its start to the start of the next one.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import msgspec
import torch
from benchmark.report import versions
from engine_bench.model_steps import ModelSteps

from lightserve.model_config import load_model_config
from lightserve.model_worker.cuda.blueprint import load_blueprint
from lightserve.model_worker.cuda.graph import CudaCapturer
from lightserve.model_worker.tensor_parallel import SingleRank

_NUM_SLOTS, _MAX_LEN, _MAX_TOKENS, _MIN_ROWS = 200_000, 8192, 8192, 256
_PACKAGES = ("lightserve", "torch", "triton", "numpy")
_SHOWN_KERNELS, _NAME_WIDTH = 12, 70


@torch.inference_mode()
def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    if not torch.cuda.is_available():
        print("bench_model.py: there is no CUDA device", file=sys.stderr)
        return 1
    steps = _open(options.model_dir, max(_MIN_ROWS, *(num_decode for num_decode, _ in options.steps)))
    results: dict[str, Any] = {"times": [], "kernels": {}}
    for num_decode, chunk_lens in options.steps:
        result = steps.time(num_decode, options.context, chunk_lens)
        results["times"].append(asdict(result))
        print(
            f"{_name(num_decode, chunk_lens):>8}  room for {result.num_tokens:4} tokens  {result.ms:7.3f} ms",
            flush=True,
        )
    for num_decode, chunk_lens in options.kernels:
        shares = steps.kernels(num_decode, options.context, chunk_lens)
        results["kernels"][_name(num_decode, chunk_lens)] = [asdict(share) for share in shares]
        print(f"{_name(num_decode, chunk_lens)}: launches in a step, µs to the next kernel's start, own µs")
        for share in shares[:_SHOWN_KERNELS]:
            print(
                f"  {share.count:6.1f} {share.until_next_us:8.2f} {share.duration_us:8.2f}  {share.name[:_NAME_WIDTH]}"
            )
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(_described(arguments, results)), indent=2))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--decodes", type=_steps, default=[], help="decode rows of steps without prompts")
    parser.add_argument("--mixed", type=_steps, default=[], help="steps with prompts")
    parser.add_argument("--context", type=int, default=576, help="tokens of each decode row, the step's own included")
    parser.add_argument("--kernels", type=_steps, default=[], help="steps to trace")
    parser.add_argument("--json", type=Path, help="write everything here")
    options = parser.parse_args(arguments)
    options.steps = options.decodes + options.mixed
    if not options.steps + options.kernels:
        parser.error("nothing to time: give --decodes, --mixed or --kernels")
    return options


def _steps(text: str) -> list[tuple[int, list[int]]]:
    """Read "1,3+100+50": steps, each its decode rows and the lengths of its prompts."""
    steps = [[int(number) for number in step.split("+")] for step in text.split(",")]
    return [(num_decode, chunk_lens) for num_decode, *chunk_lens in steps]


def _name(num_decode: int, chunk_lens: Sequence[int]) -> str:
    return "+".join(map(str, (num_decode, *chunk_lens)))


def _open(model_dir: Path, num_rows: int) -> ModelSteps:
    device = torch.device("cuda")
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
    torch.cuda.set_stream(stream)
    config = load_model_config(model_dir, "dummy")
    blueprint = load_blueprint(
        config,
        SingleRank(),
        num_rows=num_rows,
        max_tokens=_MAX_TOKENS,
        max_req_total_len=_MAX_LEN,
        vocab_size=config.vocab_size,
        dtype=torch.bfloat16,
        device=device,
        load_format="dummy",
    )
    return ModelSteps(blueprint, _NUM_SLOTS, CudaCapturer(stream))


def _described(arguments: Sequence[str], results: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["bench_model.py", *arguments],
        "versions": versions(_PACKAGES) | {"cuda": torch.version.cuda or "none"},
        "gpu": torch.cuda.get_device_name(),
        **results,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
