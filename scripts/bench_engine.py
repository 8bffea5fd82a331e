"""Measure the engine without a server around it: model workers, fed by the router's own loop.

    bench_engine.py --model_dir scripts/presets/llama-3.1-8b --load_format dummy \\
        --decode_batches 1,8,16,64,256 --prompt_len 512 --prefill_lens 512,8192 --trace lengths.csv --json out.json

Every setting of the server is a flag here too, and does what it does there. Prompts are drawn anew for each run: the
prefix cache knows none of them. The decode step is the difference between two output lengths, divided by their
distance, so that prompts drop out; the first start and every run before a measurement warm the engine up.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from benchmark.traces import read_trace
from engine_bench.engine_host import EngineError, open_engine
from engine_bench.measurements import OUTPUT_LENS, Meter
from script_tools.flags import input_file, output_file, output_folder, positive_int, positive_ints
from script_tools.json_file import write_json
from script_tools.surroundings import describe_surroundings

from lightserve.config import ServerConfig, add_flags, underscored
from lightserve.errors import ConfigError, InvariantError

_SHOWN_KERNELS, _NAME_WIDTH = 16, 90


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    try:
        return _measure(options, arguments)
    except (ConfigError, EngineError, InvariantError) as error:
        print(f"bench_engine.py: {error}", file=sys.stderr)
        return 2


def _measure(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    fields = {field.name for field in dataclasses.fields(ServerConfig)}
    config = ServerConfig(**{name: value for name, value in vars(options).items() if name in fields})
    results: dict[str, Any] = {"decode": [], "prefill": [], "traces": [], "profiles": {}}
    with open_engine(config) as host:
        print(f"ready after {host.start_s:.1f} s with {host.num_slots} slots: {host.note}", flush=True)
        meter = Meter(host)
        for batch in options.decode_batches:
            decode = meter.decode(batch, options.prompt_len, options.output_lens, options.repeats)
            results["decode"].append(decode)
            print(decode, flush=True)
        for prompt_len in options.prefill_lens:
            prefill = meter.prefill(prompt_len, options.repeats)
            results["prefill"].append(prefill)
            print(prefill, flush=True)
        for batch in options.profile_batches:
            path = options.profile_dir / f"decode-{batch}.json"
            profile = meter.profile(batch, options.prompt_len, options.profile_steps, path)
            results["profiles"][batch] = profile
            _show_profile(batch, profile)
        for path, rows in options.traces:
            trace = meter.trace(rows)
            results["traces"].append(trace)
            print(path.name, trace, flush=True)
        results["start_s"], results["num_slots"], results["note"] = host.start_s, host.num_slots, host.note
        results["stats"] = host.stats()
    if options.json is not None:
        write_json(options.json, describe_surroundings(["bench_engine.py", *arguments]) | results)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, ServerConfig)
    ours = parser.add_argument_group("measurements")
    ours.add_argument("--decode_batches", type=positive_ints, default=[], help="batch sizes of decode steps")
    ours.add_argument("--prompt_len", type=positive_int, default=512, help="of decode steps' prompts")
    ours.add_argument("--output_lens", type=_pair, default=OUTPUT_LENS, help="the two output lengths")
    ours.add_argument("--prefill_lens", type=positive_ints, default=[], help="lengths of single prompts")
    ours.add_argument(
        "--trace",
        type=input_file,
        action="append",
        default=[],
        help="lengths of requests that all come at once, at most --max_queued_reqs",
    )
    ours.add_argument("--trace_rows", type=positive_int, help="only so many of its rows")
    ours.add_argument("--profile_batches", type=positive_ints, default=[], help="batch sizes to trace the GPU at")
    ours.add_argument("--profile_steps", type=positive_int, default=24, help="output tokens under the trace")
    ours.add_argument("--profile_dir", type=output_folder, default=Path(), help="where traces go")
    ours.add_argument("--repeats", type=positive_int, default=3, help="medians are over so many")
    ours.add_argument("--json", type=output_file, help="write everything here")
    options = parser.parse_args(underscored(arguments))
    try:
        options.traces = [(path, read_trace(path, options.trace_rows)) for path in options.trace]
    except (OSError, ValueError) as error:
        parser.error(f"--trace: {error}")
    if empty := [str(path) for path, rows in options.traces if not rows]:
        parser.error(f"--trace {empty[0]} holds no request")
    return options


def _pair(text: str) -> tuple[int, int]:
    lengths = positive_ints(text)
    if len(lengths) != 2 or lengths[0] >= lengths[1]:
        raise argparse.ArgumentTypeError(f"must be two integers, the smaller one first, not {text!r}")
    return lengths[0], lengths[1]


def _show_profile(batch: int, profile: Any) -> None:
    idle = 1 - profile.busy_ms / max(profile.span_ms, 1e-9)
    print(f"profile at batch {batch}: {profile.span_ms:.1f} ms, idle {idle:.1%}", flush=True)
    for kernel in profile.kernels[:_SHOWN_KERNELS]:
        each_us = 1000 * kernel.total_ms / kernel.count
        print(f"  {kernel.total_ms:9.2f} ms {kernel.count:6d} x {each_us:8.1f} us  {kernel.name[:_NAME_WIDTH]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
