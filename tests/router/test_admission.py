from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightserve.errors import InvariantError
from lightserve.router.admission import Admission, Charge

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


def charge_of(req: Running, step: int) -> Charge:
    return Charge(base=req.held - step, end=step + req.steps_left)


requests = st.builds(Running, held=st.integers(0, 50), steps_left=st.integers(1, 50))


@given(st.lists(requests, max_size=MAX_ROWS), st.integers(0, 10**12))
def test_the_peak_is_what_a_simulation_to_the_end_finds(running: list[Running], step: int) -> None:
    admission = Admission(10**6, MAX_ROWS)
    for row, req in enumerate(running):
        charge = charge_of(req, step)
        expected = admission.peak_with(charge)
        admission.add(row, charge)
        assert admission.peak() == expected
    assert admission.peak() == peak_by_simulation(running)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_over_random_lives_use_never_exceeds_the_promise_nor_the_pool(data: st.DataObject) -> None:
    pool = data.draw(st.integers(10, 200), label="pool")
    admission = Admission(pool, MAX_ROWS)
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
            charge = charge_of(req, step)
            if len(running) < MAX_ROWS and admission.fits(charge):
                row = min(set(range(MAX_ROWS)) - running.keys())
                running[row] = Running(req.held, req.steps_left)
                admission.add(row, charge)
        assert admission.peak() == peak_by_simulation(list(running.values()))
        for req in running.values():
            req.held, req.steps_left = req.held + 1, req.steps_left - 1
        assert sum(req.held for req in running.values()) <= admission.peak() <= pool


def test_a_request_that_would_overflow_at_some_later_step_does_not_fit() -> None:
    admission = Admission(100, MAX_ROWS)
    admission.add(0, charge_of(Running(held=40, steps_left=20), 0))  # 60 at its end
    assert admission.fits(charge_of(Running(held=20, steps_left=20), 0))
    assert not admission.fits(charge_of(Running(held=21, steps_left=20), 0))
    # Longer but lighter: when the first ends it holds 30, and 90 at its own.
    assert admission.fits(charge_of(Running(held=10, steps_left=80), 0))


def test_equal_ends_are_told_apart_by_row() -> None:
    admission = Admission(100, MAX_ROWS)
    for row, held in enumerate([5, 7, 9]):
        admission.add(row, Charge(held, 10))
    admission.remove(1)
    assert admission.peak() == 5 + 9 + 20


def test_a_charge_is_changed_only_if_the_new_one_fits() -> None:
    admission = Admission(100, MAX_ROWS)
    admission.add(2, Charge(50, 10))
    admission.add(3, Charge(10, 20))
    assert not admission.change_if_it_fits(3, Charge(31, 10))
    assert admission.charge_of(3) == Charge(10, 20)
    assert admission.change_if_it_fits(3, Charge(30, 10))
    assert admission.charge_of(3) == Charge(30, 10)
    assert admission.peak() == 100


def test_charging_twice_and_discharging_nobody_are_refused() -> None:
    admission = Admission(100, MAX_ROWS)
    admission.add(3, Charge(10, 20))
    with pytest.raises(InvariantError):
        admission.add(3, Charge(1, 1))
    with pytest.raises(InvariantError):
        admission.remove(4)
