import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from lightserve.errors import InvariantError
from lightserve.router.arrays import SlotArray
from lightserve.router.slots import SlotAllocator

NUM_SLOTS = 197


def is_one_run(slots: SlotArray) -> bool:
    return bool(np.all(np.diff(slots) == 1))


class AllocatorMachine(RuleBasedStateMachine):
    """Requests that take a run, grow one by one or as a batch, and give back all or the half."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(NUM_SLOTS)
        self.owners: dict[int, list[int]] = {}
        self.num_owners = 0

    @rule(target=held, num_tokens=st.integers(1, 70), room=st.integers(0, 90))
    def allocate(self, num_tokens: int, room: int) -> int:
        self.num_owners += 1
        self.owners[self.num_owners] = []
        if num_tokens > self.allocator.num_free:
            with pytest.raises(InvariantError):
                self.allocator.allocate(num_tokens, room)
            return self.num_owners
        slots = self.allocator.allocate(num_tokens, room)
        self.take(self.num_owners, slots.tolist())
        return self.num_owners

    @precondition(lambda self: any(self.owners.values()))
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        growing = [owner for owner, slots in self.owners.items() if slots]
        growing = data.draw(st.lists(st.sampled_from(growing), unique=True))
        last_slots = np.array([self.owners[owner][-1] for owner in growing], dtype=np.int32)
        if len(growing) > self.allocator.num_free:
            with pytest.raises(InvariantError):
                self.allocator.extend(last_slots)
            return
        free_before = np.append(self.allocator.free_mask(), False)
        slots = self.allocator.extend(last_slots)
        for owner, last, slot in zip(growing, last_slots.tolist(), slots.tolist(), strict=True):
            assert slot == last + 1 or not free_before[last + 1]
            self.take(owner, [slot])

    @rule(owner=consumes(held), half=st.booleans())
    def free(self, owner: int, half: bool) -> None:
        slots = self.owners.pop(owner)
        kept = slots[: len(slots) // 2] if half else []
        self.allocator.free(np.array(slots[len(kept) :], dtype=np.int32))
        if kept:
            self.owners[owner] = kept  # for ever: only `extend` meets it again

    @precondition(lambda self: self.allocator.num_free)
    @rule(data=st.data())
    def free_what_is_free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(np.flatnonzero(self.allocator.free_mask()).tolist()))
        with pytest.raises(InvariantError):
            self.allocator.free(np.array([slot], dtype=np.int32))

    def take(self, owner: int, slots: list[int]) -> None:
        taken = {slot for others in self.owners.values() for slot in others}
        assert taken.isdisjoint(slots)
        assert len(set(slots)) == len(slots)
        self.owners[owner].extend(slots)

    @invariant()
    def used_and_free_make_the_whole(self) -> None:
        used = sorted(slot for slots in self.owners.values() for slot in slots)
        assert np.flatnonzero(~self.allocator.free_mask()).tolist() == used
        assert self.allocator.num_free + len(used) == NUM_SLOTS
        assert self.allocator.num_used == len(used)


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAllocator = AllocatorMachine.TestCase


def test_a_prompt_leaves_room_for_its_answer_and_then_extends_in_place() -> None:
    allocator = SlotAllocator(1000)
    first = allocator.allocate(10, room=100)
    second = allocator.allocate(10, room=100)
    last_slots = np.array([first[-1], second[-1]], dtype=np.int32)
    for _ in range(90):
        slots = allocator.extend(last_slots)
        assert slots.tolist() == (last_slots + 1).tolist()
        last_slots = slots


def test_a_prompt_is_scattered_only_when_no_run_is_long_enough() -> None:
    allocator = SlotAllocator(1000)
    everything = allocator.allocate(1000)
    allocator.free(everything[[*range(100, 200), *range(300, 500, 2)]])
    assert allocator.allocate(100).tolist() == list(range(100, 200))
    assert sorted(allocator.allocate(100).tolist()) == list(range(300, 500, 2))


def test_runs_that_were_freed_in_pieces_are_found_again() -> None:
    allocator = SlotAllocator(1000)
    everything = allocator.allocate(1000)
    for first in range(0, 400, 10):
        allocator.free(everything[first : first + 10])
    assert is_one_run(allocator.allocate(400))


def test_a_prompt_goes_on_where_its_last_chunk_ended() -> None:
    allocator = SlotAllocator(1000)
    first = allocator.allocate(100, room=500)
    other = allocator.allocate(100, room=500)
    second = allocator.allocate(200, after=int(first[-1]))
    assert is_one_run(np.concatenate([first, second]))
    assert not set(second.tolist()) & set(other.tolist())


def test_where_no_two_free_slots_are_neighbours_every_token_still_finds_one() -> None:
    allocator = SlotAllocator(1000)
    everything = allocator.allocate(1000)
    last_slots = everything[1::20]
    allocator.free(everything[::2])
    for _ in range(10):
        last_slots = allocator.extend(last_slots)
        assert len(set(last_slots.tolist())) == 50
    assert allocator.num_free == 0


@pytest.mark.parametrize("slots", [[-1], [30], [5, 5], [7, 6, 7]])
def test_foreign_and_doubled_slots_are_refused_and_nothing_is_freed(slots: list[int]) -> None:
    allocator = SlotAllocator(30)
    allocator.allocate(30)
    with pytest.raises(InvariantError):
        allocator.free(np.array(slots, dtype=np.int32))
    assert allocator.num_free == 0


def test_freeing_twice_is_refused() -> None:
    allocator = SlotAllocator(30)
    slots = allocator.allocate(4)
    allocator.free(slots)
    with pytest.raises(InvariantError, match="free already"):
        allocator.free(slots)
    assert allocator.num_free == 30


def test_extending_from_a_free_slot_is_refused() -> None:
    with pytest.raises(InvariantError, match="free"):
        SlotAllocator(30).extend(np.array([3], dtype=np.int32))


def test_freeing_nothing_is_nothing() -> None:
    allocator = SlotAllocator(30)
    allocator.free(np.zeros(0, dtype=np.int32))
    assert allocator.num_free == 30
