"""Who may write where: every slot of the key/value cache, handed out token by token."""

import heapq

import numpy as np

from lightserve.errors import InvariantError
from lightserve.router.arrays import BoolArray, SlotArray

# Shorter runs are not worth knowing: such slots are handed out one by one. A step of scripts/bench_router.py with 1,024
# rows and no prefix cache takes 4.0 ms so and with 256, 6.2 ms with 1.
_MIN_RUN = 32
# Known runs that turn out to be too short before a prompt is scattered: each look costs 4 µs.
_MAX_TRIES = 8


class SlotAllocator:
    """The free slots of a pool of ``num_slots``.

    Three views of them, so that everything is a few array operations and O(1) amortised for each token, also when not
    two free slots lie together. A bitmap tells the truth. A queue lists every free slot, and some that have been taken
    since, to take any. A heap knows long runs, longest first, to take neighbours; its entries are checked when they
    are used, and found anew from the bitmap once a good part of the pool has been freed.

    Used by one thread.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_free = 0
        self._is_free = np.zeros(num_slots + 1, dtype=np.bool_)  # the last is a sentinel: the last slot's neighbour
        self._queue = np.zeros(num_slots, dtype=np.int32)  # a ring
        self._queue_head = 0
        self._queue_len = 0
        self._is_queued = np.zeros(num_slots, dtype=np.bool_)
        self._runs: list[tuple[int, int]] = []  # heap of (-length, start)
        self._num_freed = 0  # since the runs were found last
        self._order = np.zeros(num_slots, dtype=np.int32)
        self.free(np.arange(num_slots, dtype=np.int32))

    @property
    def num_used(self) -> int:
        """Slots handed out."""
        return self.num_slots - self.num_free

    def allocate(self, num_tokens: int, room: int = 0, after: int = -1) -> SlotArray:
        """Take slots for consecutive tokens: neighbours if a long enough run is known, else any.

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
        self._check_enough(num_tokens)
        first = after + 1 if after >= 0 else self.num_slots
        if not (first + num_tokens <= self.num_slots and self._is_free[first : first + num_tokens].all()):
            found = self._take_run(num_tokens, room)
            if found is None:
                return self._take_any(num_tokens)
            first = found
        slots = np.arange(first, first + num_tokens, dtype=np.int32)
        self._mark_taken(slots)
        return slots

    def extend(self, last_slots: SlotArray) -> SlotArray:
        """Take one slot for each request's next token: the one after its last if that is free, else any.

        Args:
            last_slots: [num_reqs] int32, each request's last slot; all different.

        Returns:
            [num_reqs] int32.

        Raises:
            InvariantError: There are not enough, or a last slot is not in use.
        """
        self._check_enough(len(last_slots))
        if self._is_free[last_slots].any():
            raise InvariantError("a request extends from a slot that is free")
        slots = last_slots + np.int32(1)
        follows = self._is_free[slots]
        if follows.all():
            self._mark_taken(slots)
            return slots
        self._mark_taken(slots[follows])
        displaced = ~follows
        slots[displaced] = self._take_apart(int(np.count_nonzero(displaced)))
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
        self._check_used(slots)
        self._is_free[slots] = True
        self.num_free += len(slots)
        self._num_freed += len(slots)
        self._enqueue(slots[~self._is_queued[slots]])
        self._note_runs(slots)

    def free_mask(self) -> BoolArray:
        """Tell for each slot whether it is free: a copy, [num_slots] bool."""
        return self._is_free[:-1].copy()

    def _mark_taken(self, slots: SlotArray) -> None:
        self._is_free[slots] = False
        self.num_free -= len(slots)

    def _take_apart(self, num_slots: int) -> SlotArray:
        """Take single slots far from one another if a run allows it: each request goes on from there."""
        run = self._pop_run(2 * num_slots)
        if run is None:
            return self._take_any(num_slots)
        first, length = run
        step = length // num_slots
        slots = np.arange(first, first + num_slots * step, step, dtype=np.int32)
        self._mark_taken(slots)
        return slots

    def _take_any(self, num_slots: int) -> SlotArray:
        """Take what heads the queue."""
        pieces: list[SlotArray] = []
        missing = num_slots
        while missing:
            window = self._queue_window(max(256, 2 * missing))
            places = np.flatnonzero(self._is_free[window])[:missing]
            num_passed = int(places[-1]) + 1 if len(places) == missing else len(window)
            self._is_queued[window[:num_passed]] = False
            pieces.append(window[places])
            self._mark_taken(pieces[-1])
            self._queue_head = (self._queue_head + num_passed) % self.num_slots
            self._queue_len -= num_passed
            missing -= len(places)
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)

    def _queue_window(self, length: int) -> SlotArray:
        """Look at the head of the queue, as far as the ring's end: a copy, at most ``length`` slots."""
        length = min(length, self._queue_len, self.num_slots - self._queue_head)
        if not length:
            raise InvariantError(f"the queue is empty although {self.num_free} slots are free")
        return self._queue[self._queue_head : self._queue_head + length].copy()

    def _enqueue(self, slots: SlotArray) -> None:
        tail = (self._queue_head + self._queue_len) % self.num_slots
        num_before_end = min(len(slots), self.num_slots - tail)
        self._queue[tail : tail + num_before_end] = slots[:num_before_end]
        self._queue[: len(slots) - num_before_end] = slots[num_before_end:]
        self._is_queued[slots] = True
        self._queue_len += len(slots)

    def _take_run(self, num_tokens: int, room: int) -> int | None:
        """Find a run for so many tokens; return where they begin. What is left of it is known on."""
        run = self._pop_run(num_tokens)
        if run is None:
            return None
        start, length = run
        spare = length - num_tokens
        after = min(room, (spare + 1) // 2)
        self._push_run(start, spare - after)
        self._push_run(start + length - after, after)
        return start + spare - after

    def _pop_run(self, length: int) -> tuple[int, int] | None:
        """Take a run of at least ``length`` out of the heap, if one is known, as (start, length)."""
        if self._num_freed >= self.num_slots // 4:
            self._find_runs()
        for _ in range(_MAX_TRIES):
            if not self._runs or -self._runs[0][0] < length:
                return None
            known_length, start = heapq.heappop(self._runs)
            actual = self._free_part(start, -known_length)
            if actual[1] >= length:
                return actual
            self._push_run(*actual)
        return None

    def _free_part(self, start: int, length: int) -> tuple[int, int]:
        """Tell what is left of a run: its begin may have been taken, and what lies behind a hole is given up."""
        free = self._is_free[start : start + length]
        head = int(free.argmax())
        rest = free[head:]
        if not rest[0]:
            return start, 0
        hole = int(rest.argmin())
        return start + head, len(rest) if rest[hole] else hole

    def _push_run(self, start: int, length: int) -> None:
        if length >= _MIN_RUN:
            heapq.heappush(self._runs, (-length, start))

    def _note_runs(self, slots: SlotArray) -> None:
        """Note the runs in slots that have just been freed, joined to nothing beside them."""
        if len(slots) < _MIN_RUN:
            return
        breaks = np.flatnonzero(np.diff(slots) != 1)
        firsts = np.concatenate(([0], breaks + 1))
        lengths = np.diff(np.concatenate((firsts, [len(slots)])))
        for index in np.flatnonzero(lengths >= _MIN_RUN).tolist():
            self._push_run(int(slots[firsts[index]]), int(lengths[index]))

    def _find_runs(self) -> None:
        """Find all runs anew. Each slot freed since the last time pays for four that are looked at."""
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False))  # the sentinel ends the last run
        starts, ends = edges[::2], edges[1::2]
        is_long = ends - starts >= _MIN_RUN
        self._runs = list(zip((starts - ends)[is_long].tolist(), starts[is_long].tolist(), strict=True))
        heapq.heapify(self._runs)
        self._num_freed = 0

    def _check_enough(self, num_slots: int) -> None:
        if num_slots > self.num_free:
            raise InvariantError(f"{num_slots} slots asked for, {self.num_free} of {self.num_slots} are free")

    def _check_used(self, slots: SlotArray) -> None:
        first, last = int(slots.min()), int(slots.max())
        if first < 0 or last >= self.num_slots:
            raise InvariantError(f"slots {first} to {last} freed in a pool of {self.num_slots}")
        if self._is_free[slots].any():
            raise InvariantError("a slot was freed that is free already")
        order = np.arange(len(slots), dtype=np.int32)
        self._order[slots] = order
        if (self._order[slots] != order).any():
            raise InvariantError("a slot was freed twice at once")
