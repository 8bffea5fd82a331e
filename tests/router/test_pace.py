"""Pace against a device that is simulated: steps run one behind another, and planning and launching take their time."""

import pytest

from lightserve.ipc.messages import StepPlan, StepResult, pack_int32
from lightserve.router.pace import Pace


def make_plan(step_id: int, num_decode: int, prefill_rows: list[int]) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        released_rows=b"",
        new_reqs=[],
        decode_rows=pack_int32(range(num_decode)),
        prefill_rows=pack_int32(prefill_rows),
        prefill_starts=b"",
        prefill_lens=b"",
        out_slots=b"",
    )


class Device:
    """Runs each step for its time.

    Args:
        overhead_s: What it takes to plan and launch a step.
    """

    def __init__(self, overhead_s: float) -> None:
        self.now = 0.0
        self.idle_s = 0.0
        self._overhead_s = overhead_s
        self._duration_s = 0.0
        self._free_at = 0.0
        self._num_steps = 0
        self._pace = Pace(self._launch, lambda: self.now)

    def spare_s(self) -> float:
        """Tell for how long the next step need not be planned yet."""
        return max(0.0, self._pace.spare_s())

    def run(self, durations_s: list[float], *, num_decode: int = 1, prefill_rows: list[int] | None = None) -> float:
        """Run steps as the router does; return for how long the device then was idle."""
        idle_before_s = self.idle_s
        for self._duration_s in durations_s:
            self.now += self.spare_s() + self._overhead_s
            self._pace.step(make_plan(self._num_steps, num_decode, prefill_rows or []))
        return self.idle_s - idle_before_s

    def _launch(self, plan: StepPlan) -> StepResult | None:
        ended_at = self._free_at
        waited = self.now > ended_at
        result = StepResult(self._num_steps - 1, b"", b"", waited) if self._num_steps else None
        self._num_steps += 1
        self.idle_s += max(0.0, self.now - ended_at) if result else 0.0
        self._free_at = max(ended_at, self.now) + self._duration_s
        self.now = max(ended_at, self.now)
        return result


def test_the_device_is_never_idle_while_planning_takes_less_than_is_allowed_for_it() -> None:
    assert Device(overhead_s=0.001).run([0.005] * 100) == 0


def test_steps_are_planned_late() -> None:
    device = Device(overhead_s=0.001)
    device.run([0.005] * 3)
    for _ in range(80):
        device.run([0.005])
        assert device.spare_s() == pytest.approx(0.0035)


@pytest.mark.parametrize("overhead_s", [0.002, 0.004])
def test_where_planning_takes_longer_the_device_soon_hardly_waits(overhead_s: float) -> None:
    device = Device(overhead_s)
    device.run([0.005] * 100)
    assert device.run([0.005] * 1000) < 0.001 * 5.0


def test_where_planning_takes_longer_than_a_step_every_step_is_planned_at_once() -> None:
    device = Device(overhead_s=0.006)
    assert device.run([0.005] * 10_000) == pytest.approx(10_000 * 0.001, rel=0.01)
    assert device.spare_s() == 0


def test_a_step_that_is_shorter_than_those_before_makes_the_device_wait_once() -> None:
    device = Device(overhead_s=0.001)
    device.run([0.025] * 20)
    assert 0 < device.run([0.005] * 3) < 0.025
    assert device.run([0.005] * 100) == 0


def test_steps_that_get_longer_leave_the_device_no_idle_time() -> None:
    device = Device(overhead_s=0.001)
    device.run([0.005] * 20)
    assert device.run([0.025] * 100) == 0


def test_a_step_with_prompts_does_not_count_as_a_long_one() -> None:
    device = Device(overhead_s=0.001)
    device.run([0.005] * 20)
    device.run([0.1] * 20, prefill_rows=[1])
    assert device.run([0.005] * 20) == 0


def test_a_batch_that_shrinks_leaves_the_device_no_idle_time() -> None:
    device = Device(overhead_s=0.001)
    device.run([0.075] * 20, num_decode=64)
    assert device.run([0.02] * 100, num_decode=1) == 0
    assert device.spare_s() == pytest.approx(0.0185)


def test_a_row_that_leaves_does_not_make_planning_early() -> None:
    device = Device(overhead_s=0.001)
    device.run([0.05] * 20, num_decode=5)
    device.run([0.05], num_decode=4)
    device.run([0.05], num_decode=4)
    assert device.spare_s() == pytest.approx(0.0485)


def test_a_first_step_that_is_long_leaves_the_device_no_idle_time() -> None:
    device = Device(overhead_s=0.001)
    device.run([0.1], prefill_rows=[1])
    assert device.run([1.0] + [0.005] * 20) == 0


def test_steps_that_only_release_rows_say_nothing_of_others() -> None:
    device = Device(overhead_s=0.001)
    device.run([0.005] * 20)
    device.run([0.005] * 20, num_decode=0)
    device.run([0.005] * 20)
    assert device.spare_s() == pytest.approx(0.0035)
