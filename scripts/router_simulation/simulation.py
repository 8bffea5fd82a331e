"""Runs the router through a workload."""

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightserve.router.admission import Admission, Claim, ConservativeAdmission
from lightserve.router.limits import Limits
from lightserve.router.past_future import PastFutureAdmission
from lightserve.router.scheduler import Scheduler
from router_simulation.baselines import AggressiveAdmission, ReserveAllAdmission, StaticAdmission
from router_simulation.clients import Clients
from router_simulation.modelled_worker import ModelledWorker, VirtualClock
from router_simulation.timeline import Timeline

POLICIES = ("conservative", "past_future", "static", "reserve_all", "aggressive")


@dataclass(frozen=True)
class LatencyLimits:
    """What makes an answer good.

    Attributes:
        ttft_s: Longest time to its first token.
        tpot_s: Longest mean time between its tokens.
    """

    ttft_s: float
    tpot_s: float


class Simulation:
    """One run.

    Args:
        policy: One of ``POLICIES``.
        limits: The scheduler's.
        max_overflow_prob: For past_future.
        clients: Whom it serves.
        worker: What it drives.
        clock: The time of both.
    """

    def __init__(
        self,
        policy: str,
        limits: Limits,
        max_overflow_prob: float,
        clients: Clients,
        worker: ModelledWorker,
        clock: VirtualClock,
    ) -> None:
        self._limits = limits
        self._clients = clients
        self._worker = worker
        self._clock = clock
        self._decision_s = array("d")
        self.timeline = Timeline()
        admission = self._make_admission(policy, max_overflow_prob)
        admission.fits = self._timed(admission.fits)  # type: ignore[method-assign]
        self.scheduler = Scheduler(limits, admission, clients.take, clock)
        self.wall_s = 0.0

    def run(self, on_progress: Callable[[int], None]) -> None:
        """Serve everybody."""
        start = time.perf_counter()
        while not self._clients.all_ended:
            self._turn()
            if self.scheduler.num_steps % 10_000 == 0:
                on_progress(self._clients.num_ended)
        self.wall_s = time.perf_counter() - start

    def report(self, limits: LatencyLimits) -> dict[str, Any]:
        """Tell what came of it."""
        clients, timeline, pool = self._clients, self.timeline, self._limits.max_total_token_num
        ttft_s = clients.first_token_s - clients.sent_s
        tpot_s = (clients.last_token_s - clients.first_token_s) / np.maximum(1, clients.num_tokens - 1)
        duration_s = float(clients.last_token_s.max() - clients.sent_s.min())
        is_good = (clients.num_tokens > 0) & (ttft_s <= limits.ttft_s) & (tpot_s <= limits.tpot_s)
        decision_us = np.array(self._decision_s) * 1e6
        return {
            "requests": len(ttft_s),
            "failed": len(clients.failures),
            "duration_s": duration_s,
            "req_per_s": len(ttft_s) / duration_s,
            "output_tok_per_s": int(clients.num_tokens.sum()) / duration_s,
            "goodput_req_per_s": int(is_good.sum()) / duration_s,
            "ttft_limit_s": limits.ttft_s,
            "tpot_limit_s": limits.tpot_s,
            **_percentiles("ttft_s", ttft_s),
            **_percentiles("tpot_ms", tpot_s * 1000),
            **{f"itl_ms_p{percent}": clients.gap_percentile_s(percent) * 1000 for percent in (50, 90, 99)},
            "max_total_token_num": pool,
            "peak_slots": int(timeline.slots.max()),
            "mean_slots": timeline.mean_slots(while_waiting=False),
            "mean_slots_while_waiting": timeline.mean_slots(while_waiting=True),
            "mean_use_while_waiting": timeline.mean_slots(while_waiting=True) / pool,
            "mean_running": float(timeline.running.mean()),
            "pauses": self.scheduler.num_pauses,
            "hit_rate": clients.num_cached / max(1, clients.num_prompt_tokens),
            "steps": self.scheduler.num_steps,
            "worker_busy_frac": self._worker.busy_s / duration_s,
            "decisions": len(decision_us),
            "decision_us_p50": float(np.percentile(decision_us, 50)),
            "decision_us_p99": float(np.percentile(decision_us, 99)),
            "wall_s": self.wall_s,
        }

    def _turn(self) -> None:
        if self.scheduler.is_idle:
            self._clock.now_s = max(self._clock.now_s, self._clients.next_arrival_s())
        for message in self._clients.due():
            self.scheduler.add(message)
        plan = self.scheduler.plan()
        self.timeline.note(
            self._clock.now_s, self.scheduler.used_slots, self.scheduler.num_running, self.scheduler.num_waiting
        )
        result = self._worker.flush() if plan is None else self._worker.step(plan)
        if result is not None:
            self.scheduler.apply(result)

    def _make_admission(self, policy: str, max_overflow_prob: float) -> Admission:
        pool, max_rows = self._limits.max_total_token_num, self._limits.running_max_req_size
        match policy:
            case "conservative":
                return ConservativeAdmission(pool, max_rows)
            case "past_future":
                return PastFutureAdmission(pool, max_rows, self._limits.max_slots_per_req, max_overflow_prob)
            case "static":
                return StaticAdmission(pool)
            case "reserve_all":
                return ReserveAllAdmission(pool)
            case "aggressive":
                return AggressiveAdmission(lambda: pool - self.scheduler.used_slots, reserve=pool // 100)
            case _:
                raise ValueError(f"no policy is called {policy}")

    def _timed(self, fits: Callable[..., bool]) -> Callable[..., bool]:
        def timed(claim: Claim, shared: Iterable[tuple[int, int]] = ()) -> bool:
            start = time.thread_time()  # other work on the machine does not count
            verdict = fits(claim, shared)
            self._decision_s.append(time.thread_time() - start)
            return verdict

        return timed


def _percentiles(name: str, values: Any) -> dict[str, float]:
    return {f"{name}_p{percent}": float(np.percentile(values, percent)) for percent in (50, 90, 99)}
