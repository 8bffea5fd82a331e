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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import torch
from engine_bench.model_steps import ModelSteps
from script_tools.flags import output_file, positive_int
from script_tools.json_file import write_json
from script_tools.surroundings import describe_surroundings

from lightserve.errors import ConfigError
from lightserve.model_config import load_model_config
from lightserve.model_worker.cuda.blueprint import load_blueprint
from lightserve.model_worker.cuda.graph import CudaCapturer
from lightserve.model_worker.tensor_parallel import SingleRank

_NUM_SLOTS, _MAX_LEN = 200_000, 8192
_LEAST_ROWS, _LEAST_TOKENS = 256, 8192  # a step's shape is chosen as in an engine with room for so much
_SHOWN_KERNELS, _NAME_WIDTH = 12, 70


@dataclass(frozen=True)
class Step:
    """One step to time: decode rows, and beside them prompts of these lengths."""

    num_decode: int
    chunk_lens: Sequence[int] = ()

    @property
    def num_rows(self) -> int:
        """Decode rows and prompts."""
        return self.num_decode + len(self.chunk_lens)

    @property
    def num_tokens(self) -> int:
        """Of all of them."""
        return self.num_decode + sum(self.chunk_lens)

    def __str__(self) -> str:
        return "+".join(map(str, (self.num_decode, *self.chunk_lens)))


@torch.inference_mode()
def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    if not torch.cuda.is_available():
        print("bench_model.py: there is no CUDA device", file=sys.stderr)
        return 1
    steps = _open(options.model_dir, *room_for([*options.steps, *options.kernels]))
    results: dict[str, Any] = {"times": [], "kernels": {}}
    for step in options.steps:
        result = steps.time(step.num_decode, options.context, step.chunk_lens)
        results["times"].append(asdict(result))
        print(f"{step!s:>8}  room for {result.num_tokens:4} tokens  {result.ms:7.3f} ms", flush=True)
    for step in options.kernels:
        shares = steps.kernels(step.num_decode, options.context, step.chunk_lens)
        results["kernels"][str(step)] = [asdict(share) for share in shares]
        print(f"{step}: launches in a step, µs to the next kernel's start, own µs")
        for share in shares[:_SHOWN_KERNELS]:
            print(
                f"  {share.count:6.1f} {share.until_next_us:8.2f} {share.duration_us:8.2f}  {share.name[:_NAME_WIDTH]}"
            )
    if options.json is not None:
        write_json(options.json, describe_surroundings(["bench_model.py", *arguments]) | results)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--decodes", type=_steps, default=[], help="decode rows of steps without prompts")
    parser.add_argument("--mixed", type=_steps, default=[], help="steps with prompts")
    parser.add_argument(
        "--context", type=positive_int, default=576, help="tokens of each decode row, the step's own included"
    )
    parser.add_argument("--kernels", type=_steps, default=[], help="steps to trace")
    parser.add_argument("--json", type=output_file, help="write everything here")
    options = parser.parse_args(arguments)
    options.steps = options.decodes + options.mixed
    if not options.steps + options.kernels:
        parser.error("nothing to time: give --decodes, --mixed or --kernels")
    if not 1 <= options.context <= _MAX_LEN:
        parser.error(f"--context must be from 1 to {_MAX_LEN}")
    for flag in ("decodes", "mixed", "kernels"):
        for step in getattr(options, flag):
            if problem := _problem(step):
                parser.error(f"--{flag} {step}: {problem}")
    try:
        load_model_config(options.model_dir, "dummy")
    except ConfigError as error:
        parser.error(str(error))
    return options


def _steps(text: str) -> list[Step]:
    """Read "1,3+100+50": steps, each its decode rows and the lengths of its prompts."""
    numbers = [[int(number) for number in step.split("+")] for step in text.split(",")]
    return [Step(num_decode, chunk_lens) for num_decode, *chunk_lens in numbers]


def _problem(step: Step) -> str | None:
    """Say why a step cannot be timed; None if it can."""
    if not 1 <= step.num_tokens <= _NUM_SLOTS:
        return f"a step has from 1 to {_NUM_SLOTS} tokens"
    if not all(1 <= chunk_len <= _MAX_LEN for chunk_len in step.chunk_lens):
        return f"a prompt has from 1 to {_MAX_LEN} tokens"
    return None


def room_for(steps: Sequence[Step]) -> tuple[int, int]:
    """Tell how many rows, and tokens in a step, an engine needs for all of these."""
    return (
        max(_LEAST_ROWS, *(step.num_rows for step in steps)),
        max(_LEAST_TOKENS, *(step.num_tokens for step in steps)),
    )


def _open(model_dir: Path, num_rows: int, max_tokens: int) -> ModelSteps:
    device = torch.device("cuda")
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
    torch.cuda.set_stream(stream)
    config = load_model_config(model_dir, "dummy")
    blueprint = load_blueprint(
        config,
        SingleRank(),
        num_rows=num_rows,
        max_tokens=max_tokens,
        max_req_total_len=_MAX_LEN,
        vocab_size=config.vocab_size,
        dtype=torch.bfloat16,
        device=device,
        load_format="dummy",
    )
    return ModelSteps(blueprint, _NUM_SLOTS, CudaCapturer(stream))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
