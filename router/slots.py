"""Who may write where: every slot of the key/value cache, handed out token by token."""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightserve.errors import InvariantError

SlotArray: TypeAlias = npt.NDArray[np.int32]


class SlotAllocator:
    """The free slots of a pool of ``num_slots``.

    Free slots form maximal runs ``[start, end)``. Each run is found from either side: ``_end_of[start]`` and
    ``_start_of[end]``, and by its length: run ends are listed by the power of two below it. A decode token takes the
    first slot of a run, whose end stays, so a whole batch of them is a few array operations; such a run is moved to
    its new list when a search meets it there, which happens at most once per halving of its length.

    Used by one thread.
    """

    # [0, num_slots) of _is_free tell the truth; [num_slots] is a sentinel, so that the last slot has a neighbour.
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_free = 0
        self._is_free = np.zeros(num_slots + 1, dtype=np.bool_)
        self._end_of = np.zeros(num_slots + 2, dtype=np.int32)
        self._start_of = np.zeros(num_slots + 1, dtype=np.int32)
        self._list_of = np.full(num_slots + 1, -1, dtype=np.int8)  # by run end
        self._run_ends: list[dict[int, None]] = [{} for _ in range(num_slots.bit_length())]
        self.free(np.arange(num_slots, dtype=np.int32))

    @property
    def num_used(self) -> int:
        """Slots handed out."""
        return self.num_slots - self.num_free

    def allocate(self, num_tokens: int, room: int = 0, after: int = -1) -> SlotArray:
        """Take slots for consecutive tokens: one run if any run is long enough, else the fewest long runs.

        Args:
            num_tokens: How many.
            room: Tokens that may follow. So many slots after the run are left free, if the run found allows it without
                taking more than half of what the request before it may still grow into.
            after: Slot of the token before them, if there is one: the run begins right after it if it can.

        Returns:
            [num_tokens] int32, in the order of the tokens.

        Raises:
            InvariantError: There are not enough.
        """
        if num_tokens > self.num_free:
            raise InvariantError(f"{num_tokens} slots asked for, {self.num_free} of {self.num_slots} are free")
        if after >= 0 and self._is_free[after + 1] and self._end_of[after + 1] - after > num_tokens:
            self._take(int(self._end_of[after + 1]), after + 1, after + 1 + num_tokens)
            return np.arange(after + 1, after + 1 + num_tokens, dtype=np.int32)
        end = self._find_run(num_tokens)
        if end is None:
            return self._allocate_scattered(num_tokens)
        spare = end - int(self._start_of[end]) - num_tokens
        last = end - min(room, (spare + 1) // 2)
        self._take(end, last - num_tokens, last)
        return np.arange(last - num_tokens, last, dtype=np.int32)

    def extend(self, last_slots: SlotArray) -> SlotArray:
        """Take one slot for each request's next token: the one after its last if that is free, else any.

        Args:
            last_slots: [num_reqs] int32, each request's last slot; all different.

        Returns:
            [num_reqs] int32.

        Raises:
            InvariantError: There are not enough, or a last slot is not in use.
        """
        if len(last_slots) > self.num_free:
            raise InvariantError(f"{len(last_slots)} slots asked for, {self.num_free} of {self.num_slots} are free")
        if self._is_free[last_slots].any():
            raise InvariantError("a request extends from a slot that is free")
        slots = last_slots + np.int32(1)
        follows = self._is_free[slots]
        if follows.all():
            self._take_heads(slots)
            return slots
        self._take_heads(slots[follows])
        displaced = np.flatnonzero(~follows)
        # As much room as there is: a displaced request goes on in its new place.
        slots[displaced] = [self.allocate(1, room=self.num_slots)[0] for _ in displaced]
        return slots

    def free(self, slots: SlotArray) -> None:
        """Take slots back, in any order.

        Args:
            slots: [num_tokens] int32.

        Raises:
            InvariantError: One is outside the pool, free already, or there twice; nothing is freed then.
        """
        if not len(slots):
            return
        ordered = np.sort(slots)
        self._check_used(ordered)
        self._is_free[ordered] = True
        self.num_free += len(ordered)
        for start, end in _runs(ordered):
            self._add_run(*self._merged(start, end))

    def free_mask(self) -> npt.NDArray[np.bool_]:
        """Tell for each slot whether it is free: a copy, [num_slots] bool."""
        return self._is_free[:-1].copy()

    # ---- taking ----
    def _take(self, end: int, first: int, last: int) -> None:
        """Take ``[first, last)`` out of the run that ends at ``end``."""
        start = int(self._start_of[end])
        self._unlist(end)
        self._is_free[first:last] = False
        self.num_free -= last - first
        if start < first:
            self._add_run(start, first)
        if last < end:
            self._add_run(last, end)

    def _take_heads(self, slots: SlotArray) -> None:
        """Take the first slot of each of several runs, [n] int32."""
        ends = self._end_of[slots]
        starts = slots + np.int32(1)
        self._is_free[slots] = False
        self.num_free -= len(slots)
        self._end_of[starts] = ends
        self._start_of[ends] = starts
        for end in ends[starts == ends].tolist():
            self._unlist(end)

    def _allocate_scattered(self, num_tokens: int) -> SlotArray:
        pieces: list[SlotArray] = []
        while num_tokens:
            end = self._find_run(1)
            if end is None:
                raise InvariantError(f"no run although {self.num_free} slots are free")
            first = max(int(self._start_of[end]), end - num_tokens)
            self._take(end, first, end)
            pieces.append(np.arange(first, end, dtype=np.int32))
            num_tokens -= end - first
        return np.concatenate(pieces)

    # ---- runs ----
    def _find_run(self, length: int) -> int | None:
        """Find a run of at least ``length``, among the longest if it can, by its end."""
        shortest = length.bit_length() - 1
        for size in range(len(self._run_ends) - 1, shortest, -1):
            end = self._newest_run(size)
            if end is not None:
                return end
        return next((end for end in self._run_ends[shortest] if end - int(self._start_of[end]) >= length), None)

    def _newest_run(self, size: int) -> int | None:
        """Find the newest run of length ``[2**size, 2**(size + 1))``; move those that have shrunk to their lists."""
        ends = self._run_ends[size]
        while ends:
            end = next(reversed(ends))
            start = int(self._start_of[end])
            if (end - start).bit_length() - 1 == size:
                return end
            self._unlist(end)
            self._add_run(start, end)
        return None

    def _add_run(self, start: int, end: int) -> None:
        size = (end - start).bit_length() - 1
        self._end_of[start] = end
        self._start_of[end] = start
        self._list_of[end] = size
        self._run_ends[size][end] = None

    def _unlist(self, end: int) -> None:
        del self._run_ends[int(self._list_of[end])][end]
        self._list_of[end] = -1

    def _merged(self, start: int, end: int) -> tuple[int, int]:
        """Join a freed stretch with the free runs on its two sides, which are unlisted."""
        if start and self._list_of[start] >= 0:
            self._unlist(start)
            start = int(self._start_of[start])
        if self._is_free[end]:
            end = int(self._end_of[end])
            self._unlist(end)
        return start, end

    def _check_used(self, ordered: SlotArray) -> None:
        first, last = int(ordered[0]), int(ordered[-1])
        if first < 0 or last >= self.num_slots:
            raise InvariantError(f"slots {first} to {last} freed in a pool of {self.num_slots}")
        if not np.all(ordered[1:] != ordered[:-1]):
            raise InvariantError("a slot was freed twice at once")
        if self._is_free[ordered].any():
            raise InvariantError("a slot was freed that is free already")


def _runs(ordered: SlotArray) -> Iterator[tuple[int, int]]:
    """Yield the maximal runs ``[start, end)`` of ascending slots."""
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    firsts = ordered[np.concatenate(([0], breaks))].tolist()
    lasts = ordered[np.concatenate((breaks - 1, [len(ordered) - 1]))].tolist()
    for first, last in zip(firsts, lasts, strict=True):
        yield first, last + 1
