from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightserve.errors import InvariantError
from lightserve.router.admission import Claim, ConservativeAdmission

MAX_ROWS = 12


@dataclass
class Running:
    """What a request really does, beside what it is charged."""

    held: int
    steps_left: int


def peak_by_simulation(requests: list[Running]) -> int:
    """Let all run to their ends, one slot a step each, and watch."""
    peak = 0
    longest = max((req.steps_left for req in requests), default=0)
    for step in range(1, longest + 1):
        peak = max(peak, sum(req.held + step for req in requests if req.steps_left >= step))
    return peak


def claim_of(req: Running, step: int) -> Claim:
    """Claim for a request that holds ``held`` slots before step ``step``, as if its prompt had been in by then."""
    return Claim(req.held + 1, step, 0, req.steps_left, ignores_eos=True)


requests = st.builds(Running, held=st.integers(0, 50), steps_left=st.integers(1, 50))


@given(st.lists(requests, max_size=MAX_ROWS), st.integers(0, 10**12))
def test_the_peak_is_what_a_simulation_to_the_end_finds(running: list[Running], step: int) -> None:
    admission = ConservativeAdmission(10**6, MAX_ROWS)
    for row, req in enumerate(running):
        claim = claim_of(req, step)
        expected = admission.peak_with(claim)
        admission.add(row, claim)
        assert admission.peak() == expected
    assert admission.peak() == peak_by_simulation(running)


@settings(max_examples=80)
@given(st.data())
def test_over_random_lives_use_never_exceeds_the_promise_nor_the_pool(data: st.DataObject) -> None:
    pool = data.draw(st.integers(10, 200), label="pool")
    admission = ConservativeAdmission(pool, MAX_ROWS)
    running: dict[int, Running] = {}
    for step in range(data.draw(st.integers(1, 40), label="steps")):
        for row in [row for row, req in running.items() if not req.steps_left]:
            admission.remove(row)
            del running[row]
        ends_early = data.draw(st.booleans(), label="early end")
        if running and ends_early:
            row = data.draw(st.sampled_from(sorted(running)))
            admission.remove(row)
            del running[row]
        for req in data.draw(st.lists(requests, max_size=4), label="arrivals"):
            claim = claim_of(req, step)
            if len(running) < MAX_ROWS and admission.fits(claim):
                row = min(set(range(MAX_ROWS)) - running.keys())
                running[row] = Running(req.held, req.steps_left)
                admission.add(row, claim)
        assert admission.peak() == peak_by_simulation(list(running.values()))
        for req in running.values():
            req.held, req.steps_left = req.held + 1, req.steps_left - 1
        assert sum(req.held for req in running.values()) <= admission.peak() <= pool


def test_a_request_that_would_overflow_at_some_later_step_does_not_fit() -> None:
    admission = ConservativeAdmission(100, MAX_ROWS)
    admission.add(0, claim_of(Running(held=40, steps_left=20), 0))  # 60 at its end
    assert admission.fits(claim_of(Running(held=20, steps_left=20), 0))
    assert not admission.fits(claim_of(Running(held=21, steps_left=20), 0))
    # Longer but lighter: when the first ends it holds 30, and 90 at its own.
    assert admission.fits(claim_of(Running(held=10, steps_left=80), 0))


def test_equal_ends_are_told_apart_by_row() -> None:
    admission = ConservativeAdmission(100, MAX_ROWS)
    for row, held in enumerate([5, 7, 9]):
        admission.add(row, claim_of(Running(held, 10), 0))
    admission.remove(1)
    assert admission.peak() == 5 + 9 + 20


def test_a_changed_claim_counts_at_once() -> None:
    admission = ConservativeAdmission(100, MAX_ROWS)
    admission.add(2, claim_of(Running(50, 10), 0))
    late = Claim(slots=40, prompt_step=30, num_produced=0, max_new_tokens=10, ignores_eos=True)
    admission.add(3, late)
    assert admission.peak() == 79
    admission.change(3, replace(late, prompt_step=0))
    assert admission.peak() == 50 + 39 + 20
    assert not admission.keeps_promise()


def test_charging_twice_and_discharging_nobody_are_refused() -> None:
    admission = ConservativeAdmission(100, MAX_ROWS)
    admission.add(3, claim_of(Running(10, 20), 0))
    with pytest.raises(InvariantError):
        admission.add(3, claim_of(Running(10, 20), 0))
    with pytest.raises(InvariantError):
        admission.remove(4)
