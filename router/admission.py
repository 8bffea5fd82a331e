"""May a request join the batch? Only when the batch can be shown never to outgrow the pool.

Let the running requests and a candidate hold a_i slots, each to grow by one a step for b_i more steps. Sorted by b
descending, with A_i = a_1 + … + a_i, the most they will ever hold together is

    peak = max_i (A_i + i · b_i)

since when the i-th shortest-lived one ends, exactly those with larger b are alive, each grown by its b. Counted from an
absolute step 0, request i ends before step ``end_i`` and holds ``base_i + t`` slots before step t, so that
a_i = base_i + t, b_i = end_i - t, and

    peak = max_i (base_1 + … + base_i + i · end_i)

does not depend on t: the sorted order and every term survive from step to step, and what changes when a request comes
or goes is a suffix.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from lightserve.errors import InvariantError

NOBODY = -1  # pays for slots that no running request uses


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request may come to hold.

    Attributes:
        slots: Slots that it holds once its prompt is in, beside those that another request is charged for.
        prompt_step: The step that completes its prompt; with each step after it the request grows by one slot.
        num_produced: Tokens that it has produced in an earlier stay.
        max_new_tokens: Tokens that it may still produce.
        ignores_eos: It will produce them all.
    """

    slots: int
    prompt_step: int
    num_produced: int
    max_new_tokens: int
    ignores_eos: bool

    @property
    def base(self) -> int:
        """Slots that it would have held before step 0, had it grown like this all the time."""
        return self.slots - 1 - self.prompt_step

    @property
    def end(self) -> int:
        """The first step that it takes no part in, if it produces all it may."""
        return self.prompt_step + self.max_new_tokens


class Admission(ABC):
    """Decides who may join, from the claims of those who run.

    Slots shared through the prefix cache are charged to one payer among their sharers, so that each counts once.
    """

    def __init__(self) -> None:
        self._claims: dict[int, Claim] = {}

    @abstractmethod
    def fits(self, claim: Claim, shared: Iterable[tuple[int, int]] = ()) -> bool:
        """Tell whether a request may join now.

        Args:
            claim: What it will hold, beside what it would share.
            shared: (payer, number of slots) of each stretch that it would share.
        """

    @abstractmethod
    def peak(self) -> int:
        """Tell the most slots that the running requests are taken to hold together."""

    def add(self, row: int, claim: Claim) -> None:
        """Charge a request that joins.

        Raises:
            InvariantError: The row is charged already.
        """
        if row in self._claims:
            raise InvariantError(f"row {row} is charged already")
        self._claims[row] = claim

    def remove(self, row: int) -> None:
        """Take back the charge of a request that leaves.

        Raises:
            InvariantError: The row is not charged.
        """
        if row not in self._claims:
            raise InvariantError(f"row {row} is not charged")
        del self._claims[row]

    def claim_of(self, row: int) -> Claim:
        """Tell what a running request claims, beside what it shares."""
        return self._claims[row]

    def change(self, row: int, claim: Claim) -> None:
        """Replace a running request's claim by one of as many slots."""
        self._claims[row] = claim

    def keeps_promise(self) -> bool:
        """Tell whether those who run can all end as they may; True where nothing is promised."""
        return True

    def join(self, payer: int, row: int, num_slots: int) -> int:
        """Let a request share a stretch of slots.

        Returns:
            Who pays from now on.
        """
        return row if payer == NOBODY else payer

    def leave(self, payer: int, row: int, sharers: Collection[int], num_slots: int) -> int:
        """End a request's share of a stretch of slots.

        Args:
            payer: Who has paid.
            row: Who leaves; no longer charged.
            sharers: Who remain.
            num_slots: How long the stretch is.

        Returns:
            Who pays from now on; NOBODY if nobody remains.
        """
        return next(iter(sharers), NOBODY) if payer == row else payer

    def settle(self, payer: int, sharers: Collection[int], num_slots: int) -> int:
        """Choose the payer of a stretch anew, after a sharer's claim has changed.

        Returns:
            Who pays from now on.
        """
        return payer

    def begin_step(self, step: int) -> None:  # noqa: B027  # most policies do not care
        """Note that step ``step`` is being planned."""

    def observe_end(self, row: int, output_len: int, *, is_natural: bool) -> None:  # noqa: B027
        """Learn from a request that ends.

        Args:
            row: Its row.
            output_len: Tokens that it has produced.
            is_natural: It ended of itself, not by a limit, an abort or a failure.
        """


class ConservativeAdmission(Admission):
    """Everybody produces as much as asked for: exact when they do, and never too little.

    A shared stretch is charged to the sharer that ends last, so the peak stays exact.

    Args:
        max_total_token_num: Slots of the pool, which no peak may exceed.
        max_rows: Rows are in ``[0, max_rows)``.
    """

    def __init__(self, max_total_token_num: int, max_rows: int) -> None:
        super().__init__()
        self._max_total_token_num = max_total_token_num
        self._num_reqs = 0
        # Sorted by end, descending; [0, num_reqs) are in use. Ends are stored negated for searchsorted.
        self._neg_ends = np.zeros(max_rows, dtype=np.int64)
        self._rows = np.zeros(max_rows, dtype=np.int64)
        self._peaks = np.zeros(max_rows, dtype=np.int64)  # base_1 + … + base_i + i · end_i
        self._bases: dict[int, int] = {}  # with what is shared and paid for

    def peak(self) -> int:
        """Tell the most slots that the running requests will ever hold together."""
        return int(self._peaks[: self._num_reqs].max(initial=0))

    def keeps_promise(self) -> bool:
        """Tell whether the peak fits the pool."""
        return self.peak() <= self._max_total_token_num

    def fits(self, claim: Claim, shared: Iterable[tuple[int, int]] = ()) -> bool:
        """Tell whether the pool is large enough if a request joins now."""
        return self.peak_with(claim, shared) <= self._max_total_token_num

    def peak_with(self, claim: Claim, shared: Iterable[tuple[int, int]] = ()) -> int:
        """Tell what the peak would be if a request joined; arguments as for ``fits``."""
        count, place = self._num_reqs, self._place_for(claim.end)
        base, relieved = self._takeover(claim, shared)
        peak = self._bases_before(place) + base + (place + 1) * claim.end
        if place:
            peak = max(peak, int(self._peaks[:place].max()))
        if place < count:
            # One more request before them: each term gains its base and one more end.
            later = self._peaks[place:count] - self._neg_ends[place:count]
            for row, num_slots in relieved:
                later[self._place_of(row) - place :] -= num_slots
            peak = max(peak, int(later.max()) + base)
        return peak

    def add(self, row: int, claim: Claim) -> None:
        """Charge a request that joins."""
        super().add(row, claim)
        self._insert(row, claim.base, claim.end)

    def remove(self, row: int) -> None:
        """Take back the charge of a request that leaves."""
        self._take_out(row)
        super().remove(row)

    def change(self, row: int, claim: Claim) -> None:
        """Replace a running request's claim by one of as many slots."""
        base = self._take_out(row) + claim.base - self._claims[row].base
        super().change(row, claim)
        self._insert(row, base, claim.end)

    def join(self, payer: int, row: int, num_slots: int) -> int:
        """Charge a stretch to a new sharer, if it ends later than the one who pays."""
        if payer != NOBODY and self._claims[payer].end >= self._claims[row].end:
            return payer
        self._move(num_slots, payer, row)
        return row

    def leave(self, payer: int, row: int, sharers: Collection[int], num_slots: int) -> int:
        """Charge a stretch to the sharer that ends last, if the one who paid leaves: seldom, as it would end last."""
        return self.settle(payer, sharers, num_slots) if payer == row else payer

    def settle(self, payer: int, sharers: Collection[int], num_slots: int) -> int:
        """Charge a stretch to the sharer that ends last."""
        new_payer = max(sharers, key=lambda row: (self._claims[row].end, -row), default=NOBODY)
        if new_payer != payer:
            self._move(num_slots, payer, new_payer)
        return new_payer

    def _takeover(self, claim: Claim, shared: Iterable[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
        """Tell a candidate's base with what it would have to pay for, and from whom it would take it over."""
        base, relieved = claim.base, []
        for payer, num_slots in shared:
            if payer == NOBODY:
                base += num_slots
            elif self._claims[payer].end < claim.end:
                base += num_slots
                relieved.append((payer, num_slots))
        return base, relieved

    def _move(self, num_slots: int, payer: int, new_payer: int) -> None:
        for row, change in ((payer, -num_slots), (new_payer, num_slots)):
            if row in self._claims:  # not NOBODY, nor one that has left
                self._bases[row] += change
                self._peaks[self._place_of(row) : self._num_reqs] += change

    def _insert(self, row: int, base: int, end: int) -> None:
        count, place = self._num_reqs, self._place_for(end)
        own = self._bases_before(place) + base + (place + 1) * end
        self._peaks[place + 1 : count + 1] = self._peaks[place:count] - self._neg_ends[place:count] + base
        self._neg_ends[place + 1 : count + 1] = self._neg_ends[place:count]
        self._rows[place + 1 : count + 1] = self._rows[place:count]
        self._peaks[place], self._neg_ends[place], self._rows[place] = own, -end, row
        self._bases[row] = base
        self._num_reqs = count + 1

    def _take_out(self, row: int) -> int:
        """Take a row out of the order; return its base."""
        if row not in self._claims:
            raise InvariantError(f"row {row} is not charged")
        base, count, place = self._bases.pop(row), self._num_reqs, self._place_of(row)
        later = slice(place + 1, count)
        self._peaks[place : count - 1] = self._peaks[later] + self._neg_ends[later] - base
        self._neg_ends[place : count - 1] = self._neg_ends[later]
        self._rows[place : count - 1] = self._rows[later]
        self._num_reqs = count - 1
        return base

    def _bases_before(self, place: int) -> int:
        return int(self._peaks[place - 1] + place * self._neg_ends[place - 1]) if place else 0

    def _place_for(self, end: int) -> int:
        """Tell where a request that ends with ``end`` belongs: before those that end then or earlier."""
        return int(self._neg_ends[: self._num_reqs].searchsorted(-end))

    def _place_of(self, row: int) -> int:
        ends = self._neg_ends[: self._num_reqs]
        neg_end = -self._claims[row].end
        first, last = int(ends.searchsorted(neg_end)), int(ends.searchsorted(neg_end, side="right"))
        return first + int(np.flatnonzero(self._rows[first:last] == row)[0])
