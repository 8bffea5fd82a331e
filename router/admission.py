"""May a request join the batch? Only when the batch can be shown never to outgrow the pool.

Let the running requests and a candidate hold a_i slots, each to grow by one a step for b_i more steps. Sorted by b
descending, with A_i = a_1 + … + a_i, the most they will ever hold together is

    peak = max_i (A_i + i · b_i)

since when the i-th shortest-lived one ends, exactly those with larger b are alive, each grown by its b. Counted from an
absolute step 0, request i ends at step ``end_i`` and holds ``base_i + t`` slots before step t, so that
a_i = base_i + t, b_i = end_i - t, and

    peak = max_i (base_1 + … + base_i + i · end_i)

does not depend on t: the sorted order and every term survive from step to step, and what changes when a request comes
or goes is a suffix.
"""

from dataclasses import dataclass

import numpy as np

from lightserve.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request may hold: ``base + t`` slots before step t, until it ends before step ``end``.

    Attributes:
        base: Slots at step 0, usually negative.
        end: The first step that it takes no part in.
    """

    base: int
    end: int


class Admission:
    """The running requests' charges and the peak that they may reach.

    Args:
        max_total_token_num: Slots of the pool, which no peak may exceed.
        max_rows: Rows are in ``[0, max_rows)``.
    """

    def __init__(self, max_total_token_num: int, max_rows: int) -> None:
        self.max_total_token_num = max_total_token_num
        self._num_reqs = 0
        # Sorted by end, descending; [0, num_reqs) are in use. Ends are stored negated for searchsorted.
        self._neg_ends = np.zeros(max_rows, dtype=np.int64)
        self._rows = np.zeros(max_rows, dtype=np.int64)
        self._peaks = np.zeros(max_rows, dtype=np.int64)  # base_1 + … + base_i + i · end_i
        self._charges: dict[int, Charge] = {}

    def peak(self) -> int:
        """Tell the most slots that the running requests will ever hold together."""
        return int(self._peaks[: self._num_reqs].max(initial=0))

    def fits(self, charge: Charge) -> bool:
        """Tell whether a request with this charge may join now."""
        return self.peak_with(charge) <= self.max_total_token_num

    def peak_with(self, charge: Charge) -> int:
        """Tell what the peak would be if a request with this charge joined."""
        count = self._num_reqs
        place = int(np.searchsorted(self._neg_ends[:count], -charge.end))
        peak = self._bases_before(place) + charge.base + (place + 1) * charge.end
        if place:
            peak = max(peak, int(self._peaks[:place].max()))
        if place < count:
            # One more request before them: each term gains the base and one more end.
            later = self._peaks[place:count] - self._neg_ends[place:count]
            peak = max(peak, int(later.max()) + charge.base)
        return peak

    def add(self, row: int, charge: Charge) -> None:
        """Charge a request that joins.

        Raises:
            InvariantError: The row is charged already.
        """
        if row in self._charges:
            raise InvariantError(f"row {row} is charged already")
        count = self._num_reqs
        place = int(np.searchsorted(self._neg_ends[:count], -charge.end))
        own = self._bases_before(place) + charge.base + (place + 1) * charge.end
        self._peaks[place + 1 : count + 1] = self._peaks[place:count] - self._neg_ends[place:count] + charge.base
        self._neg_ends[place + 1 : count + 1] = self._neg_ends[place:count]
        self._rows[place + 1 : count + 1] = self._rows[place:count]
        self._peaks[place], self._neg_ends[place], self._rows[place] = own, -charge.end, row
        self._charges[row] = charge
        self._num_reqs = count + 1

    def remove(self, row: int) -> None:
        """Take back the charge of a request that leaves.

        Raises:
            InvariantError: The row is not charged.
        """
        if row not in self._charges:
            raise InvariantError(f"row {row} is not charged")
        charge = self._charges.pop(row)
        count = self._num_reqs
        place = self._place_of(row, charge.end)
        self._peaks[place : count - 1] = (
            self._peaks[place + 1 : count] + self._neg_ends[place + 1 : count] - charge.base
        )
        self._neg_ends[place : count - 1] = self._neg_ends[place + 1 : count]
        self._rows[place : count - 1] = self._rows[place + 1 : count]
        self._num_reqs = count - 1

    def charge_of(self, row: int) -> Charge:
        """Tell what a running request is charged."""
        return self._charges[row]

    def change_if_it_fits(self, row: int, charge: Charge) -> bool:
        """Replace a running request's charge, unless the peak would exceed the pool.

        Returns:
            Whether it was replaced.
        """
        former = self._charges[row]
        self.remove(row)
        fits = self.fits(charge)
        self.add(row, charge if fits else former)
        return fits

    def _bases_before(self, place: int) -> int:
        return int(self._peaks[place - 1] + place * self._neg_ends[place - 1]) if place else 0

    def _place_of(self, row: int, end: int) -> int:
        first = int(np.searchsorted(self._neg_ends[: self._num_reqs], -end, side="left"))
        last = int(np.searchsorted(self._neg_ends[: self._num_reqs], -end, side="right"))
        return first + int(np.flatnonzero(self._rows[first:last] == row)[0])
