"""When the engine's silence is too long."""

import pytest

from lightserve.http_server.pulse import Pulse


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_twenty_seconds_are_no_reason_to_worry(clock: Clock) -> None:
    pulse = Pulse(clock)
    clock.now_s = 5.0
    assert (pulse.silence_s, pulse.limit_s) == (5.0, 20.0)


def test_a_slow_step_makes_patient_but_not_for_ever(clock: Clock) -> None:
    pulse = Pulse(clock)
    for step_s, limit_s in ((4.0, 20.0), (6.0, 24.0), (50.0, 200.0), (1.0, 200.0), (10_000.0, 600.0)):
        clock.now_s += step_s
        pulse.hear()
        assert pulse.limit_s == pytest.approx(limit_s, rel=1e-3)


def test_a_hiccup_is_forgotten_after_a_few_thousand_steps(clock: Clock) -> None:
    pulse = Pulse(clock)
    clock.now_s += 100.0
    for _ in range(1 + 6000):
        pulse.hear()
        clock.now_s += 0.01
    assert pulse.limit_s == 20.0


def test_idle_time_is_no_silence(clock: Clock) -> None:
    pulse = Pulse(clock)
    clock.now_s += 1000.0
    pulse.start()
    assert (pulse.silence_s, pulse.limit_s) == (0.0, 20.0)
