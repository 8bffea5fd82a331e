"""Run the real scheduler against a modelled worker and a virtual clock.

    simulate_router.py --trace uneven.csv --max_total_token_num 60000 --router_policy conservative

Scheduler, slot allocator, admission and prefix cache are those of the server. The trace says when requests come (else
all come at once, or at --request_rate), how long prompts are, which blocks they share, where each answer really ends.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from benchmark.traces import TraceRow, read_trace
from router_simulation.clients import Clients
from router_simulation.modelled_worker import EOS_ID, KnownLengths, ModelledWorker, StepModel, VirtualClock
from router_simulation.simulation import POLICIES, LatencyLimits, Simulation
from script_tools.flags import (
    fraction,
    input_file,
    lacking,
    non_negative_float,
    non_negative_int,
    output_file,
    output_picture,
    positive_float,
    positive_int,
    rate,
)
from script_tools.json_file import write_json
from script_tools.surroundings import describe_surroundings

from lightserve.config import ServerConfig
from lightserve.errors import ConfigError
from lightserve.router.arrays import FloatArray
from lightserve.router.limits import Limits

_MODELS = Path(__file__).parent / "router_simulation" / "step_models"


def main(arguments: Sequence[str]) -> int:
    args = _parse(arguments)
    try:
        return _simulate(args, arguments)
    except MemoryError as error:
        print(f"simulate_router.py: too little memory for so large a pool, batch or trace: {error}", file=sys.stderr)
        return 2


def _simulate(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    rng = np.random.default_rng(args.seed)
    rows = _choose_rows(args.rows, args.num_requests, rng)
    clock = VirtualClock()
    clients = Clients(rows, _arrivals(rows, args, rng), clock, args.max_new_tokens, args.max_concurrency)
    limits = _limits(rows, args)
    num_rows = limits.running_max_req_size
    answer_ids = KnownLengths(np.array([row.output_len for row in rows]), num_rows)
    worker = ModelledWorker(args.model, clock, answer_ids, num_rows)
    simulation = Simulation(args.router_policy, limits, args.max_overflow_prob, clients, worker, clock)
    simulation.run(lambda num_ended: print(f"\r{num_ended}/{len(rows)}", end="", file=sys.stderr))
    print(file=sys.stderr)
    if len(clients.failures) == len(rows):
        print(f"simulate_router.py: every request failed; the first: {clients.failures[0]}", file=sys.stderr)
        return 2
    report = {
        "policy": args.router_policy,
        "trace": args.trace.name,
        "step_model": args.step_model.stem,
        **simulation.report(LatencyLimits(args.ttft_limit_ms / 1000, args.tpot_limit_ms / 1000)),
    }
    print("\n".join(f"{name:26} {_shown(value)}" for name, value in report.items()))
    if args.json:
        write_json(args.json, describe_surroundings(["simulate_router.py", *arguments]) | report)
    if args.plot:
        from router_simulation.plot import draw_plot  # needs an extra

        draw_plot(simulation.timeline, args.max_total_token_num, args.plot)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=input_file, required=True, help="a .csv or .jsonl trace")
    parser.add_argument("--max_total_token_num", type=positive_int, required=True)
    parser.add_argument("--router_policy", choices=POLICIES, default="conservative")
    parser.add_argument("--max_new_tokens", type=positive_int, help="what every client asks for; unset: what it gets")
    parser.add_argument(
        "--num_requests", type=positive_int, help="draw so many from the trace; unset: the trace as it is"
    )
    parser.add_argument(
        "--request_rate", type=rate, help="Poisson arrivals per second; unset: the trace's, else at once"
    )
    parser.add_argument(
        "--speedup", type=positive_float, default=1.0, help="the trace's arrivals come so many times as fast"
    )
    parser.add_argument("--max_concurrency", type=positive_int, help="most requests open at once")
    parser.add_argument("--running_max_req_size", type=positive_int, default=1024)
    parser.add_argument("--chunked_prefill_size", type=positive_int, default=8192)
    parser.add_argument("--max_overflow_prob", type=fraction, default=0.02)
    parser.add_argument("--max_itl_ms", type=non_negative_float, default=0.0)
    parser.add_argument("--disable_prefix_cache", action="store_true")
    parser.add_argument("--step_model", type=input_file, default=_MODELS / "h200_llama3_8b.json", help="a .json file")
    parser.add_argument("--ttft_limit_ms", type=positive_float, default=2000.0, help="for goodput")
    parser.add_argument("--tpot_limit_ms", type=positive_float, default=50.0, help="for goodput")
    parser.add_argument("--seed", type=non_negative_int, default=0)
    parser.add_argument("--json", type=output_file, help="write everything here")
    parser.add_argument("--plot", type=output_picture, help="a picture; needs matplotlib (pip install matplotlib)")
    args = parser.parse_args(arguments)
    try:
        ServerConfig(max_overflow_prob=args.max_overflow_prob)  # which knows its bounds
    except ConfigError as error:
        parser.error(str(error))
    if args.plot and (problem := lacking("matplotlib")):
        parser.error(f"--plot {problem}")
    try:
        args.rows = read_trace(args.trace, None)
    except (OSError, ValueError) as error:
        parser.error(f"--trace: {error}")
    if not args.rows:
        parser.error(f"--trace {args.trace} holds no request")
    try:
        args.model = StepModel.read(args.step_model)
    except (OSError, ValueError) as error:
        parser.error(f"--step_model {args.step_model}: {error}")
    return args


def _choose_rows(rows: list[TraceRow], num_requests: int | None, rng: np.random.Generator) -> list[TraceRow]:
    if num_requests is None:
        return rows
    return [rows[index] for index in rng.integers(0, len(rows), num_requests).tolist()]


def _arrivals(rows: list[TraceRow], args: argparse.Namespace, rng: np.random.Generator) -> FloatArray:
    if args.request_rate:
        return np.cumsum(rng.exponential(1 / args.request_rate, len(rows)))
    if args.num_requests is None and rows[0].timestamp_s is not None:
        times_s: FloatArray = np.array([row.timestamp_s for row in rows], dtype=np.float64)
        since_s: FloatArray = (times_s - times_s[0]) / args.speedup
        return since_s
    return np.zeros(len(rows))


def _limits(rows: list[TraceRow], args: argparse.Namespace) -> Limits:
    longest = max(row.prompt_len + max(row.output_len, args.max_new_tokens or 0) for row in rows)
    return Limits(
        max_total_token_num=args.max_total_token_num,
        max_req_total_len=longest,
        running_max_req_size=args.running_max_req_size,
        batch_max_tokens=args.chunked_prefill_size + args.running_max_req_size,
        chunked_prefill_size=args.chunked_prefill_size,
        max_queued_reqs=len(rows),
        eos_token_ids=(EOS_ID,),
        has_prefix_cache=not args.disable_prefix_cache,
        max_itl_s=args.max_itl_ms / 1000,
    )


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
