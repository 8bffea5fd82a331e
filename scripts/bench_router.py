"""Measure what a router step costs: receive, apply results, plan, encode, at several batch sizes; and one decision.

    python scripts/bench_router.py [--rows 64,256,1024] [--steps 500] [--json FILE]

The batch is kept full: requests end at their rate and new ones with prompts of their own follow. Messages are encoded
and decoded as they are between processes; the model worker answers at once. Times are of this thread alone, so that
other work on the machine does not count.
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import msgspec
import numpy as np
from script_tools.flags import output_file, positive_int, positive_ints
from script_tools.json_file import write_json
from script_tools.plain_ids import draw_ids
from script_tools.surroundings import describe_surroundings

from lightserve.ipc.messages import (
    DetokenizerInbox,
    FinishCode,
    GenerateMsg,
    RouterInbox,
    StepPlan,
    StepResult,
    TextParams,
    TokensMsg,
    count_int32,
    pack_float32,
    pack_int32,
    unpack_int32,
)
from lightserve.router.admission import Admission, Claim, ConservativeAdmission
from lightserve.router.arrays import IdArray
from lightserve.router.limits import Limits
from lightserve.router.past_future import PastFutureAdmission
from lightserve.router.process import Router
from lightserve.router.scheduler import Scheduler
from lightserve.sampling_params import SamplingParams

PROMPT_LEN, OUTPUT_LEN = 216, 209  # means of the ShareGPT-like trace
VOCAB_SIZE, EOS_ID = 32_000, 2


class Clients:
    """An inbox that keeps ``num_reqs`` requests running and a few waiting, as bytes."""

    def __init__(self, num_reqs: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._num_reqs = num_reqs
        self._num_sent = 0
        self.num_ended = 0
        self._decoder: msgspec.msgpack.Decoder[RouterInbox] = msgspec.msgpack.Decoder(RouterInbox)

    def receive(self, timeout_s: float | None = None) -> RouterInbox | None:
        """Wait for nothing: ``drain`` follows."""
        return None

    def drain(self) -> list[RouterInbox]:
        """Take as many new requests as have ended."""
        return list(self._arrivals())

    def _arrivals(self) -> Iterator[RouterInbox]:
        while self._num_sent < self.num_ended + self._num_reqs:
            self._num_sent += 1
            prompt_ids = draw_ids(self._rng, VOCAB_SIZE, PROMPT_LEN)
            # Lengths spread so that ends do not come together.
            output_len = int(self._rng.integers(1, 2 * OUTPUT_LEN))
            sampling = SamplingParams(output_len, ignore_eos=True)
            message = GenerateMsg(self._num_sent, pack_int32(prompt_ids), sampling, TextParams())
            yield self._decoder.decode(msgspec.msgpack.encode(message))


class Worker:
    """Answers each plan at once, as bytes."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepResult)
        self._result: bytes | None = None
        self._rows: dict[int, int] = {}
        self.own_s = 0.0

    def step(self, plan: StepPlan) -> StepResult | None:
        """Return the result of the plan before; the time for making this plan's is kept apart."""
        raw_plan = self._encoder.encode(plan)
        previous = self._decoder.decode(self._result) if self._result else None
        start = time.thread_time()
        self._result = self._encoder.encode(self._run(msgspec.msgpack.decode(raw_plan, type=StepPlan)))
        self.own_s += time.thread_time() - start
        return previous

    def flush(self) -> StepResult | None:
        """Return the last result."""
        previous, self._result = self._result, None
        return self._decoder.decode(previous) if previous else None

    def _run(self, plan: StepPlan) -> StepResult:
        for new in plan.new_reqs:
            self._rows[new.req_row] = count_int32(new.ids)
        rows = unpack_int32(plan.prefill_rows).tolist()
        ends = (unpack_int32(plan.prefill_starts) + unpack_int32(plan.prefill_lens)).tolist()
        num_ending = sum(end == self._rows[row] for row, end in zip(rows, ends, strict=True))
        num_sampled = count_int32(plan.decode_rows) + num_ending
        token_ids: IdArray = np.full(num_sampled, 5, dtype=np.int32)
        return StepResult(plan.step_id, pack_int32(token_ids), pack_float32(np.zeros(num_sampled)))


def limits_for(num_rows: int, pool: int, *, has_prefix_cache: bool) -> Limits:
    return Limits(pool, 8192, num_rows, 8192 + num_rows, 8192, 100_000, (EOS_ID,), has_prefix_cache)


def make_admission(policy: str, limits: Limits) -> Admission:
    if policy == "past_future":
        return PastFutureAdmission(limits.max_total_token_num, limits.running_max_req_size, 8192, 0.02)
    return ConservativeAdmission(limits.max_total_token_num, limits.running_max_req_size)


def measure_steps(policy: str, num_rows: int, num_steps: int, *, has_prefix_cache: bool) -> dict[str, Any]:
    """Time whole turns of the router's loop at ``num_rows`` running requests, with some more waiting."""
    # As many slots as the rows need in the mean: both limits bind, as in a pool that is just right.
    limits = limits_for(num_rows, num_rows * (PROMPT_LEN + OUTPUT_LEN), has_prefix_cache=has_prefix_cache)
    clients, worker, encoder = Clients(num_rows + 64, seed=0), Worker(), msgspec.msgpack.Encoder()

    def send(message: DetokenizerInbox) -> None:
        encoder.encode(message)
        if isinstance(message, TokensMsg):
            clients.num_ended += len(message.finish) - message.finish.count(FinishCode.NONE)

    scheduler = Scheduler(limits, make_admission(policy, limits), send)
    router = Router(clients, send, scheduler, worker)
    for _ in range(2 * OUTPUT_LEN + 100):
        router.turn()
    gc.collect()
    gc.freeze()
    times, num_running = [], []
    for _ in range(num_steps):
        worker.own_s = 0.0
        start = time.thread_time()
        router.turn()
        times.append(time.thread_time() - start - worker.own_s)
        num_running.append(scheduler.load().num_running)
    millis = np.array(times) * 1000
    return {
        "policy": policy,
        "prefix_cache": has_prefix_cache,
        "rows": num_rows,
        "mean_running": float(np.mean(num_running)),
        **{f"step_ms_p{p}": float(np.percentile(millis, p)) for p in (50, 90, 99)},
        "step_ms_mean": float(millis.mean()),
    }


def measure_decision(policy: str, num_running: int) -> dict[str, Any]:
    """Time one ``fits`` with ``num_running`` requests running."""
    limits = limits_for(num_running + 1, num_running * 500, has_prefix_cache=True)
    admission = make_admission(policy, limits)
    rng = np.random.default_rng(0)
    admission.begin_step(0)
    for row in range(num_running):
        admission.add(row, Claim(int(rng.integers(1, 1000)), 0, 0, int(rng.integers(1, 1000)), ignores_eos=False))
    candidate = Claim(216, 0, 0, 209, ignores_eos=False)
    admission.fits(candidate)
    times = []
    for _ in range(2000):
        start = time.thread_time()
        admission.fits(candidate)
        times.append(time.thread_time() - start)
    return {"policy": policy, "running": num_running, "decision_us_p50": float(np.median(times) * 1e6)}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=positive_ints, default=[64, 256, 1024], help="batch sizes")
    parser.add_argument("--steps", type=positive_int, default=500, help="at each of them (%(default)s)")
    parser.add_argument("--json", type=output_file, help="write everything here")
    args = parser.parse_args(arguments)
    results: dict[str, list[dict[str, Any]]] = {"steps": [], "decisions": []}
    for policy in ("conservative", "past_future"):
        results["decisions"].append(measure_decision(policy, 1000))
        print(results["decisions"][-1])
        for num_rows in args.rows:
            for has_prefix_cache in (True, False):
                results["steps"].append(measure_steps(policy, num_rows, args.steps, has_prefix_cache=has_prefix_cache))
                print(results["steps"][-1])
    if args.json:
        write_json(args.json, describe_surroundings(["bench_router.py", *arguments]) | results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
