"""Measure the figures of docs/performance.md on one GPU, and print them beside their floors and goals.

    bench_table.py --trace lengths.csv [--repeats 3] [--only server,8b,1b] [--json FILE]

server  a whole server of an 8B's shape: its start, once with nothing compiled and once with everything; then 3,000
        requests of the trace at once, 100 of it four at a time, and one stream at a time
8b, 1b  the engine by itself: decode steps by batch, prefill

Weights are random. Each row is printed once it is measured, and all figures but the starts are medians of --repeats
runs: 3 take less than ten minutes on an H200. Exit status: 0, whether goals are met or not; 1 if something failed.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import torch
from benchmark.traces import read_trace
from engine_bench.engine_figures import EngineRuns, measure_engine
from engine_bench.engine_host import EngineError
from engine_bench.result_table import TABLE_HEAD, Measured, Target, table_row
from engine_bench.server_figures import (
    FIRST_START,
    LATER_START,
    FailedRequestsError,
    Load,
    MissingFigureError,
    measure_server,
)
from script_tools.flags import output_file, positive_int
from script_tools.json_file import write_json
from script_tools.running_server import BENCH_FLAGS, ServerDiedError
from script_tools.surroundings import describe_surroundings

from lightserve.config import ServerConfig, underscored
from lightserve.errors import ConfigError, InvariantError

_PRESETS = Path(__file__).resolve().parent / "presets"
_PARTS = ("server", "8b", "1b")
_NUM_AT_ONCE = 3000
_FAILURES = (
    EngineError,
    ServerDiedError,
    FailedRequestsError,
    MissingFigureError,
    ConfigError,
    InvariantError,
    subprocess.CalledProcessError,
    OSError,
)

# Unit, floor and goal of each figure.
TARGETS = {
    FIRST_START: Target("s", None, 25),
    LATER_START: Target("s"),
    "3,000 requests at once": Target("req/s", 79, 65),
    "concurrency 4: time per token, p50": Target("ms", 3.6, 4.3),
    "concurrency 4: time to first token, p50": Target("ms", None, 12),
    "concurrency 4: inter-token latency, p99": Target("ms", None, 6),
    "one stream, 128 in, 256 out": Target("tokens/s", 285, 240),
    "one stream: time to first token, p50": Target("ms", None, 9),
    "8B decode, prompts of 512, batch 1": Target("ms", 3.6, 4.1),
    "8B decode, prompts of 512, batch 8": Target("ms", 3.7, 4.3),
    "8B decode, prompts of 512, batch 16": Target("ms", 3.8, 4.5),
    "8B decode, prompts of 512, batch 64": Target("ms", 4.7, 5.6),
    "8B decode, prompts of 512, batch 256": Target("ms", 10.7, 12.0),
    "8B prefill, 8,192 tokens": Target("ms"),
    "1B decode, prompts of 128, batch 1": Target("ms", 0.58, 0.85),
    "1B decode, prompts of 128, batch 16": Target("ms", 0.61, 0.95),
    "1B decode, prompts of 128, batch 256": Target("ms", 1.34, 2.4),
}


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    if not torch.cuda.is_available():
        print("bench_table.py: there is no CUDA device", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers and workers are stopped
    surroundings = describe_surroundings(["bench_table.py", *arguments])
    return measure_table(_parts(options), TARGETS, surroundings, options.json)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--trace", type=Path, help="of the server's requests: lengths (CSV), at least 3,000")
    parser.add_argument("--repeats", type=positive_int, default=3, help="of every figure but the starts (%(default)s)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(_PARTS), help="some of the parts")
    parser.add_argument("--json", type=output_file, help="write everything here, too")
    options = parser.parse_args(underscored(arguments))
    if unknown := set(options.only) - set(_PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if "server" in options.only and (problem := _trace_problem(options.trace)):
        parser.error(problem)
    return options


def _trace_problem(trace: Path | None) -> str | None:
    if trace is None:
        return "the server needs --trace"
    try:
        num_rows = len(read_trace(trace, _NUM_AT_ONCE))
    except (OSError, ValueError) as error:
        return f"--trace: {error}"
    return f"--trace {trace} has only {num_rows} requests" if num_rows < _NUM_AT_ONCE else None


def _parts(options: argparse.Namespace) -> dict[str, Iterable[Measured]]:
    """Parts that were asked for; each is measured when it is gone through."""
    flags = ["--model_dir", str(_PRESETS / "llama-3.1-8b"), *BENCH_FLAGS]
    parts = {"server": measure_server(flags, server_loads(options.trace), options.repeats)}
    parts |= {name: measure_engine(runs, options.repeats) for name, runs in ENGINES.items()}
    return {name: part for name, part in parts.items() if name in options.only}


def server_loads(trace: Path | None) -> list[Load]:
    """Choose what the server is loaded with."""
    return [
        Load(
            _flags(dataset=trace, num_prompts=_NUM_AT_ONCE, client_processes=4),
            {"3,000 requests at once": ["request_throughput"]},
        ),
        Load(
            _flags(dataset=trace, num_prompts=100, max_concurrency=4, num_warmups=4),
            {
                "concurrency 4: time per token, p50": ["tpot_ms", "p50"],
                "concurrency 4: time to first token, p50": ["ttft_ms", "p50"],
                "concurrency 4: inter-token latency, p99": ["itl_ms", "p99"],
            },
        ),
        Load(
            _flags(prompt_len=128, output_len=256, num_prompts=5, max_concurrency=1, num_warmups=2),
            {
                "one stream, 128 in, 256 out": ["output_throughput"],
                "one stream: time to first token, p50": ["ttft_ms", "p50"],
            },
        ),
    ]


def _flags(**values: object) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def _random_weights(preset: str) -> ServerConfig:
    return ServerConfig(model_dir=str(_PRESETS / preset), load_format="dummy")


ENGINES = {
    "8b": EngineRuns("8B", _random_weights("llama-3.1-8b"), 512, (1, 8, 16, 64, 256), (8192,)),
    "1b": EngineRuns("1B", _random_weights("llama-3.2-1b"), 128, (1, 16, 256)),
}


def measure_table(
    parts: Mapping[str, Iterable[Measured]],
    targets: Mapping[str, Target],
    surroundings: dict[str, Any],
    json: Path | None,
) -> int:
    """Measure one part after the other, whatever becomes of those before it; print and write each row at once.

    Args:
        parts: By name.
        targets: By the name of the figure.
        surroundings: Written before the rows.
        json: Where everything is written, if anywhere.

    Returns:
        The exit status.
    """
    everything: dict[str, Any] = {**surroundings, "rows": [], "reports": {name: [] for name in parts}, "failed": {}}
    print(_head(surroundings), flush=True)
    for name, part in parts.items():
        try:
            for measured in part:
                _add(measured, targets, everything["rows"])
                everything["reports"][name].append(measured.report)
                _write(everything, json)
        except _FAILURES as error:
            print(f"bench_table.py: {name}: {error}", file=sys.stderr, flush=True)
            everything["failed"][name] = str(error)
            _write(everything, json)
    return int(bool(everything["failed"]))


def _head(surroundings: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in surroundings["versions"].items())
    place = f"{surroundings['gpu']}, commit {surroundings['commit']}, {surroundings['date']}; {versions}"
    return f"`{surroundings['command']}`\n\n{place}\n\n{TABLE_HEAD}"


def _add(measured: Measured, targets: Mapping[str, Target], rows: list[dict[str, Any]]) -> None:
    for figure in measured.figures:
        target = targets[figure.what]
        print(table_row(figure, target), flush=True)
        rows.append(
            {
                "what": figure.what,
                "unit": target.unit,
                "floor": target.floor,
                "goal": target.goal,
                "values": figure.values,
                "median": figure.median,
                "goal_met": target.is_met(figure.median),
            }
        )


def _write(everything: dict[str, Any], json: Path | None) -> None:
    """Write all that there is so far; that it could not be written is forgotten once it can."""
    if json is None:
        return
    everything["failed"].pop("--json", None)
    try:
        write_json(json, everything)
    except OSError as error:
        print(f"bench_table.py: --json {json}: {error}", file=sys.stderr, flush=True)
        everything["failed"]["--json"] = str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
