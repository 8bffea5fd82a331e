"""Admission from what answers have been like: full use of the pool where clients ask for more than they use.

After "Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025, arXiv 2507.10150), but with a bound on
the batch as a whole instead of a predicted length for each request. Let S be the survival function of recent output
lengths. A request that has produced q tokens without ending produces more than q + t with probability S(q + t) / S(q),
as long as it may. With h_i slots held now and s_i(t) that probability, the batch needs, t steps from now,

    in the mean  m(t) = Σ (h_i + t) s_i(t)        with variance  v(t) = Σ (h_i + t)² s_i(t) (1 - s_i(t))

and a candidate joins iff with it m(t) + z √v(t) fits the pool at every t, z being the normal quantile of the bound on
the chance of an overflow.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from lightserve.router.admission import NOBODY, Admission, Claim
from lightserve.router.arrays import BoolArray, FloatArray, IntArray
from lightserve.router.output_lengths import OutputLengths

_EVERYBODY = -2  # pays for what several share
# Of scripts/simulate_router.py, 1,000 requests of the ShareGPT-like trace that all ask for 2,048 tokens, 30,000 slots.
# 37.3 requests a second; 200 lengths know too little of the longest, 35.3. More would remember what has passed.
_WINDOW = 2000
# Ends; to learn takes 60 µs. After each one 37.4 requests a second, after 200 31.7, as the first lesson comes late.
_RELEARN_EVERY = 20
# At 1 a request counts as longer than it is until the next time, 34.3; at 16 37.6, with four times as much to add up.
_TIMES_PER_OCTAVE = 4


@dataclass(frozen=True, slots=True)
class _Demand:
    """What some requests need, at each time of the grid.

    Attributes:
        mean: [num_times] slots.
        variance: [num_times] slots².
        most: [num_times] slots, if all produce as much as they may.
    """

    mean: FloatArray
    variance: FloatArray
    most: FloatArray

    def plus(self, other: "_Demand") -> "_Demand":
        """Add an independent demand."""
        return _Demand(self.mean + other.mean, self.variance + other.variance, self.most + other.most)

    def plus_certain(self, num_slots: FloatArray | int) -> "_Demand":
        """Add what is needed in any case, at all times or at each, [num_times]."""
        return _Demand(self.mean + num_slots, self.variance, self.most + num_slots)

    def bound(self, z: float) -> float:
        """Tell what is exceeded at no time but with the chance that ``z`` stands for."""
        return float(np.minimum(self.mean + z * np.sqrt(self.variance), self.most).max())


class PastFutureAdmission(Admission):
    """Everybody ends when such answers have ended of late.

    Slots that several share are there as long as any of them runs; they are counted as if for ever.

    Args:
        max_total_token_num: Slots of the pool.
        max_rows: Rows are in ``[0, max_rows)``.
        max_len: Most tokens of one request.
        max_overflow_prob: Chance of an overflow that an admission may leave.
    """

    def __init__(self, max_total_token_num: int, max_rows: int, max_len: int, max_overflow_prob: float) -> None:
        super().__init__()
        self._max_total_token_num = max_total_token_num
        self._z = NormalDist().inv_cdf(1 - max_overflow_prob)
        grid = _time_grid(max_len)
        self._times, self._next_times = grid[:-1], grid[1:]
        self._lengths = OutputLengths(_WINDOW)
        self._survival: FloatArray = np.ones(1)
        self._num_learnt = 0
        self._step = 0
        self._is_running = np.zeros(max_rows, dtype=np.bool_)
        self._bases = np.zeros(max_rows, dtype=np.int64)  # held before step t: base + t
        self._ends = np.zeros(max_rows, dtype=np.int64)
        self._births = np.zeros(max_rows, dtype=np.int64)  # produced by the steps before t: t - birth
        self._produced_before = np.zeros(max_rows, dtype=np.int64)
        self._is_certain = np.zeros(max_rows, dtype=np.bool_)
        self._num_shared = 0
        self._demand: _Demand | None = None  # of those who run, at this step
        self._candidate: tuple[Claim, _Demand] | None = None  # the last one asked about, and the demand with it

    def begin_step(self, step: int) -> None:
        """Start a step."""
        self._step = step
        self._demand = None

    def fits(self, claim: Claim, shared: Iterable[tuple[int, int]] = ()) -> bool:
        """Tell whether the pool overflows with at most the given chance if a request joins now."""
        num_slots = claim.slots
        demand = self._running_demand()
        for payer, num_shared in shared:
            if payer == NOBODY:
                num_slots += num_shared
            elif payer != _EVERYBODY:
                demand = demand.plus_certain(num_shared * (1 - self._survival_of(payer)))
        joining = self._demand_of(
            held=np.array([num_slots - 1 - (claim.prompt_step - self._step)]),
            steps_left=np.array([claim.end - self._step]),
            produced=np.array([self._step - claim.prompt_step + claim.num_produced]),
            produced_before=np.array([claim.num_produced]),
            is_certain=np.array([claim.ignores_eos]),
        )
        demand = demand.plus(joining)
        self._candidate = claim, demand
        return demand.bound(self._z) <= self._max_total_token_num

    def peak(self) -> int:
        """Tell the bound for those who run."""
        return round(self._running_demand().bound(self._z))

    def add(self, row: int, claim: Claim) -> None:
        """Count a request that joins."""
        super().add(row, claim)
        self._is_running[row] = True
        self._is_certain[row] = claim.ignores_eos
        self._produced_before[row] = claim.num_produced
        self._bases[row] = claim.base
        self._count(row, claim)
        if self._candidate is not None and self._candidate[0] is claim:
            self._demand = self._candidate[1]  # with what it is about to share

    def remove(self, row: int) -> None:
        """Count a request no longer."""
        super().remove(row)
        self._is_running[row] = False
        self._demand = None

    def change(self, row: int, claim: Claim) -> None:
        """Replace a running request's claim by one of as many slots."""
        self._bases[row] += claim.base - self._claims[row].base
        super().change(row, claim)
        self._count(row, claim)

    def observe_end(self, row: int, output_len: int, *, is_natural: bool) -> None:
        """Learn an output length, unless the client had fixed it."""
        if not self._is_certain[row]:
            self._lengths.add(output_len, is_natural=is_natural)

    def join(self, payer: int, row: int, num_slots: int) -> int:
        """Let a request share a stretch of slots: alone it pays, together everybody does."""
        new_payer = row if payer == NOBODY else _EVERYBODY
        self._move(num_slots, payer, new_payer)
        return new_payer

    def leave(self, payer: int, row: int, sharers: Collection[int], num_slots: int) -> int:
        """Let the last sharer pay alone."""
        new_payer = _EVERYBODY if len(sharers) > 1 else next(iter(sharers), NOBODY)
        self._move(num_slots, payer, new_payer)
        self._demand = None
        return new_payer

    def _move(self, num_slots: int, payer: int, new_payer: int) -> None:
        if payer == new_payer:
            return
        for account, change in ((payer, -num_slots), (new_payer, num_slots)):
            if account == _EVERYBODY:
                self._num_shared += change
            elif account != NOBODY:
                self._bases[account] += change

    def _count(self, row: int, claim: Claim) -> None:
        self._ends[row] = claim.end
        self._births[row] = claim.prompt_step - claim.num_produced
        self._demand = None

    def _running_demand(self) -> _Demand:
        if self._demand is None:
            rows = np.flatnonzero(self._is_running)
            self._learn(rows)
            self._demand = self._demand_of(
                held=self._bases[rows] + self._step,
                steps_left=self._ends[rows] - self._step,
                produced=self._step - self._births[rows],
                produced_before=self._produced_before[rows],
                is_certain=self._is_certain[rows],
            ).plus_certain(self._num_shared)
        return self._demand

    def _demand_of(
        self,
        held: IntArray,
        steps_left: IntArray,
        produced: IntArray,
        produced_before: IntArray,
        is_certain: BoolArray,
    ) -> _Demand:
        """Add up what requests will need, each array [num_reqs].

        Args:
            held: Slots before this step.
            steps_left: Steps until it must have ended.
            produced: Tokens of the steps before this one. That the last of them did not end it is not known yet.
            produced_before: Tokens of earlier stays.
            is_certain: It will not end before it must.
        """
        count = int(self._times.searchsorted(steps_left.max(initial=0)))  # later, nobody is left
        survival = self._survival_at(self._times[:count], steps_left, produced, produced_before, is_certain)
        # Until the next time of the grid they grow on, as long as they may.
        needed = np.minimum(self._next_times[:count], steps_left[:, None]).astype(np.float32)
        needed += held[:, None].astype(np.float32)
        in_mean = needed * survival
        demand = np.zeros((3, len(self._times)))
        in_mean.sum(axis=0, out=demand[0, :count])
        np.einsum("it,it,it->t", in_mean, needed, 1 - survival, out=demand[1, :count], casting="unsafe")
        np.einsum("it,it->t", needed, survival > 0, out=demand[2, :count], casting="unsafe")
        return _Demand(*demand)

    def _survival_of(self, row: int) -> FloatArray:
        """Tell a running request's chance to run still, [num_times]."""
        rows = np.array([row])
        survival = self._survival_at(
            self._times,
            self._ends[rows] - self._step,
            self._step - self._births[rows],
            self._produced_before[rows],
            self._is_certain[rows],
        )
        alone: FloatArray = survival[0].astype(np.float64)
        return alone

    def _survival_at(
        self,
        times: IntArray,
        steps_left: IntArray,
        produced: IntArray,
        produced_before: IntArray,
        is_certain: BoolArray,
    ) -> npt.NDArray[np.float32]:
        """Tell the chance that a request still runs; arguments as for ``_demand_of``; [num_reqs, num_times]."""
        last = len(self._survival) - 1
        known = np.minimum(np.maximum(produced - 1, produced_before), last)
        reached = np.clip((produced - 1)[:, None] + times, known[:, None], last)
        survival = self._survival.astype(np.float32)
        chance: npt.NDArray[np.float32] = survival[reached] / survival[known][:, None]
        chance[is_certain] = 1.0
        chance[times >= steps_left[:, None]] = 0.0
        return chance

    def _learn(self, rows: IntArray) -> None:
        if self._lengths.num_seen - self._num_learnt >= _RELEARN_EVERY:
            self._num_learnt = self._lengths.num_seen
            uncertain = rows[~self._is_certain[rows]]
            self._survival = self._lengths.survival(np.maximum(0, self._step - 1 - self._births[uncertain]))


def _time_grid(max_len: int) -> IntArray:
    """Choose the times to look at: every step at first, then so many to the octave, and the end."""
    exponents = np.arange(0, np.log2(max(2, max_len)), 1 / _TIMES_PER_OCTAVE)
    times = np.unique(np.round(2**exponents).astype(np.int64))
    return np.concatenate([[0], times[times < max_len], [max_len]])
