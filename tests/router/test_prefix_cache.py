from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lightserve.errors import InvariantError
from lightserve.router.admission import Claim, ConservativeAdmission
from lightserve.router.arrays import IdArray
from lightserve.router.prefix_cache import PrefixCache
from lightserve.router.prefix_tree import Node
from lightserve.router.slots import SlotAllocator

NUM_SLOTS = 60
NUM_ROWS = 6

Prefix: TypeAlias = tuple[str, tuple[int, ...]]


def as_ids(values: list[int]) -> IdArray:
    return np.array(values, dtype=np.int32)


@dataclass
class Sharer:
    """One running request as the machine sees it: which slot holds each of its tokens."""

    salt: str
    ids: list[int]
    slots: list[int]
    node: Node
    matched_len: int
    claim: Claim

    def prefix(self, length: int) -> Prefix:
        return self.salt, tuple(self.ids[:length])

    @property
    def num_private(self) -> int:
        """Slots that it is charged for and alone uses: what it holds, and what its prompt still needs."""
        return self.claim.slots - (self.node.end - self.matched_len)


class CacheMachine(RuleBasedStateMachine):
    """The cache against a dictionary of prefixes, each with its slot and when it was used last."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotAllocator(NUM_SLOTS)
        self.admission = ConservativeAdmission(10**9, NUM_ROWS)
        self.cache = PrefixCache(self.slots, self.admission)
        self.sharers: dict[int, Sharer] = {}
        self.cached: dict[Prefix, int] = {}
        self.used_at: dict[Prefix, int] = {}
        self.clock = 0
        self.step = 0

    def locked(self) -> set[Prefix]:
        return {req.prefix(n) for req in self.sharers.values() for n in range(1, req.node.end + 1)}

    @precondition(lambda self: len(self.sharers) < NUM_ROWS)
    @rule(
        salt=st.sampled_from(["", "a"]),
        ids=st.lists(st.integers(0, 2), min_size=1, max_size=14),
        end=st.integers(1, 30),
    )
    def start(self, salt: str, ids: list[int], end: int) -> None:
        self.step += 1
        match = self.cache.match(as_ids(ids), salt, self.step)
        expected = 0
        while expected < len(ids) - 1 and (salt, tuple(ids[: expected + 1])) in self.cached:
            expected += 1
        assert match.length == match.pending == expected
        row = min(set(range(NUM_ROWS)) - self.sharers.keys())
        claim = Claim(len(ids) - match.length, 0, 0, end, ignores_eos=True)
        expected_peak = self.admission.peak_with(claim, match.shares())
        self.admission.add(row, claim)
        node = self.cache.lock(match, row)
        assert node.end == match.length
        assert self.admission.peak() == expected_peak
        slots = node.prefix_slots().tolist()
        self.sharers[row] = Sharer(salt, ids, slots, node, match.length, claim)

    @precondition(lambda self: self.sharers)
    @rule(data=st.data(), num_tokens=st.integers(1, 8))
    def prefill(self, data: st.DataObject, num_tokens: int) -> None:
        req = self.sharers[row := data.draw(st.sampled_from(sorted(self.sharers)))]
        start = len(req.slots)
        num_tokens = min(num_tokens, len(req.ids) - start, self.cache.num_available)
        if not num_tokens:
            return
        self.make_room(num_tokens)
        self.step += 1
        slots = self.slots.allocate(num_tokens)
        req.slots += slots.tolist()
        if req.node.end < start:
            return
        may_grow = req.prefix(start + 1) not in self.cached and not self.is_cut_off(req)
        ids = as_ids(req.ids[start : start + num_tokens])
        req.node = self.cache.grow(req.node, ids, slots, row, self.step)
        assert req.node.end == (start + num_tokens if may_grow else start)
        self.keep(req, start, req.node.end)

    @precondition(lambda self: self.sharers)
    @rule(data=st.data(), output_ids=st.lists(st.integers(0, 2), max_size=5))
    def finish(self, data: st.DataObject, output_ids: list[int]) -> None:
        req = self.sharers[row := data.draw(st.sampled_from(sorted(self.sharers)))]
        if len(req.slots) == len(req.ids) and self.cache.num_available >= len(output_ids):
            self.make_room(len(output_ids))
            req.ids = req.ids + output_ids
            req.slots += self.slots.allocate(len(output_ids)).tolist()
        self.admission.remove(row)
        own = slice(req.node.end, len(req.slots))
        if not self.is_cut_off(req):
            self.clock += 1
            self.keep(req, req.node.end, len(req.slots))
        self.cache.insert(req.node, as_ids(req.ids[own]), as_ids(req.slots[own]))
        self.leave(row)

    @precondition(lambda self: self.sharers)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        req = self.sharers[row := data.draw(st.sampled_from(sorted(self.sharers)))]
        self.cache.discard(as_ids(req.ids), req.salt, req.matched_len)
        bad = req.prefix(req.matched_len + 1)
        if len(bad[1]) > req.matched_len and bad in self.cached:
            length = len(bad[1])
            for prefix in [known for known in self.cached if known[0] == bad[0] and known[1][:length] == bad[1]]:
                del self.cached[prefix], self.used_at[prefix]
        self.admission.remove(row)
        self.slots.free(as_ids(req.slots[req.node.end :]))
        self.leave(row)

    @precondition(lambda self: self.sharers)
    @rule(data=st.data(), end=st.integers(1, 30))
    def end_later_or_earlier(self, data: st.DataObject, end: int) -> None:
        req = self.sharers[row := data.draw(st.sampled_from(sorted(self.sharers)))]
        req.claim = replace(req.claim, max_new_tokens=end)
        self.admission.change(row, req.claim)
        self.cache.settle(req.node)

    @rule(num_tokens=st.integers(1, NUM_SLOTS))
    def make_room(self, num_tokens: int) -> None:
        if num_tokens > self.cache.num_available:
            with pytest.raises(InvariantError):
                self.cache.make_room(num_tokens)
            num_tokens = self.cache.num_available
        locked = self.locked()
        num_free = NUM_SLOTS - len(self.used_slots())
        if num_free < num_tokens:
            num_tokens = max(num_tokens, num_free + min(NUM_SLOTS // 32, len(self.cached.keys() - locked)))
        while num_free < num_tokens:
            parents = {(salt, ids[:-1]) for salt, ids in self.cached}
            leaves = [prefix for prefix in self.cached if prefix not in parents and prefix not in locked]
            oldest = min(leaves, key=lambda prefix: self.used_at[prefix])
            del self.cached[oldest], self.used_at[oldest]
            num_free += 1
        self.cache.make_room(num_tokens)
        assert self.slots.num_free == num_free

    def keep(self, req: Sharer, start: int, end: int) -> None:
        for length in range(start + 1, end + 1):
            if req.prefix(length) not in self.cached:
                self.cached[req.prefix(length)] = req.slots[length - 1]
                self.used_at[req.prefix(length)] = self.clock

    def leave(self, row: int) -> None:
        req = self.sharers.pop(row)
        self.clock += 1
        for length in range(1, req.node.end + 1):
            if self.cached.get(req.prefix(length)) == req.slots[length - 1]:
                self.used_at[req.prefix(length)] = self.clock
        self.cache.unlock(req.node, row)

    def is_cut_off(self, req: Sharer) -> bool:
        """Tell whether what the request shares was discarded, so that it hangs in no tree."""
        return any(self.cached.get(req.prefix(n)) != req.slots[n - 1] for n in range(1, req.node.end + 1))

    def used_slots(self) -> set[int]:
        return set(self.cached.values()) | {slot for req in self.sharers.values() for slot in req.slots}

    @invariant()
    def every_slot_is_free_or_cached_or_used_and_none_is_lost(self) -> None:
        used = self.used_slots()
        assert set(np.flatnonzero(~self.slots.free_mask()).tolist()) == used
        locked_slots = {slot for req in self.sharers.values() for slot in req.slots}
        assert self.cache.num_unlocked == len(used - locked_slots)
        assert self.slots.num_free + self.cache.num_unlocked + len(locked_slots) == NUM_SLOTS

    @invariant()
    def no_two_sequences_share_a_slot_that_do_not_share_a_prefix(self) -> None:
        owners: dict[int, Prefix] = {slot: prefix for prefix, slot in self.cached.items()}
        for req in self.sharers.values():
            for length, slot in enumerate(req.slots, start=1):
                assert owners.setdefault(slot, req.prefix(length)) == req.prefix(length)

    @invariant()
    def the_peak_is_what_a_simulation_to_the_end_finds(self) -> None:
        peak = 0
        for end in {req.claim.end for req in self.sharers.values()}:
            alive = [req for req in self.sharers.values() if req.claim.end >= end]
            shared = {slot for req in alive for slot in req.slots[: req.node.end]}
            peak = max(peak, len(shared) + sum(req.num_private - 1 + end for req in alive))
        assert self.admission.peak() == peak


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestCache = CacheMachine.TestCase


def make_cache(num_slots: int = 100, *, is_enabled: bool = True) -> tuple[PrefixCache, SlotAllocator]:
    slots = SlotAllocator(num_slots)
    return PrefixCache(slots, ConservativeAdmission(10**9, NUM_ROWS), is_enabled=is_enabled), slots


def run_through(cache: PrefixCache, slots: SlotAllocator, ids: list[int], salt: str = "") -> None:
    """Let a request with these ids come and go."""
    cache._admission.add(0, Claim(len(ids), 0, 0, 1, ignores_eos=True))
    node = cache.lock(cache.match(as_ids(ids), salt, 0), 0)
    cache.make_room(len(ids) - node.end)
    cache.insert(node, as_ids(ids[node.end :]), slots.allocate(len(ids) - node.end))
    cache._admission.remove(0)
    cache.unlock(node, 0)


def matched_len(cache: PrefixCache, ids: list[int], salt: str = "", step: int = 0) -> int:
    return cache.match(as_ids(ids), salt, step).length


def test_at_least_one_id_is_left_to_run() -> None:
    cache, slots = make_cache()
    run_through(cache, slots, [1, 2, 3, 4])
    assert matched_len(cache, [1, 2, 3, 4]) == 3
    assert matched_len(cache, [1, 2, 3, 4, 5]) == 4


def test_prefixes_match_at_any_length() -> None:
    cache, slots = make_cache()
    run_through(cache, slots, list(range(20)))
    for length in range(20):
        assert matched_len(cache, [*range(length), 99, 99]) == length


def test_prefixes_whose_ids_differ_are_never_mixed() -> None:
    cache, slots = make_cache()
    run_through(cache, slots, [7, 1, 2, 3])
    assert matched_len(cache, [7, 3, 2, 1]) == 1
    assert matched_len(cache, [-2147483648, 1, 2, 3]) == 0


def test_salts_separate() -> None:
    cache, slots = make_cache()
    run_through(cache, slots, [1, 2, 3, 4], salt="mine")
    assert matched_len(cache, [1, 2, 3, 4, 5], salt="yours") == 0
    assert matched_len(cache, [1, 2, 3, 4, 5], salt="mine") == 4


def test_a_salt_of_which_nothing_is_left_is_forgotten() -> None:
    cache, slots = make_cache()
    for index in range(50):
        run_through(cache, slots, [1, 2, 3, 4], salt=f"tenant {index}")
    cache.make_room(100)
    assert not cache._roots


def test_what_the_step_being_planned_writes_is_pending_and_can_be_read_in_the_next() -> None:
    cache, slots = make_cache()
    cache._admission.add(0, Claim(8, 5, 0, 1, ignores_eos=True))
    node = cache.lock(cache.match(as_ids([1] * 8), "", 5), 0)
    cache.grow(node, as_ids([1] * 8), slots.allocate(8), 0, step=5)
    now, later = cache.match(as_ids([1] * 9), "", 5), cache.match(as_ids([1] * 9), "", 6)
    assert (now.length, now.pending) == (0, 8)
    assert (later.length, later.pending) == (8, 8)


def test_the_least_recently_used_goes_first_and_only_as_much_of_it_as_needed() -> None:
    cache, slots = make_cache(30)
    for first in (1, 2, 3):
        run_through(cache, slots, [first] * 10)
    run_through(cache, slots, [1] * 10)
    cache.make_room(4)
    assert [matched_len(cache, [first] * 20) for first in (1, 2, 3)] == [10, 6, 10]


def test_a_cache_that_is_off_keeps_nothing() -> None:
    cache, slots = make_cache(is_enabled=False)
    run_through(cache, slots, [1, 2, 3, 4])
    assert slots.num_free == 100
    assert matched_len(cache, [1, 2, 3, 4]) == 0
