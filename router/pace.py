"""When to plan the next step: as late as the device allows.

A step that is launched while another one runs starts when that one ends. To plan it at once would shut out the requests
that come while the other runs, for a whole step more; to plan it too late would leave the device idle. So the router
goes on receiving until shortly before the running step will end. A request then waits for 0.8 steps on average before
it runs, instead of 1.5.

How long a step takes can only be seen when the next one has been launched before its end: otherwise the launch is what
ends the wait, and a step planned too late would pass for a long one, and the next be planned later still. So one step
in eight is planned at once.
"""

from collections import deque
from collections.abc import Callable

from lightserve.ipc.messages import StepPlan, StepResult, count_int32

# The shortest of these counts: steps are even, and too early is the better side to err on. One of them is always true.
_REMEMBERED_STEPS = 8
# To plan a step, send it and launch it: 0.6 to 1 ms for few rows, half of it the worker's, and 2 µs more for each row.
_LEAD_S = 0.0015
_LEAD_PER_ROW_S = 3e-6


class Pace:
    """Measures steps of decode rows, and predicts when the running one ends.

    A step with prompts in it is taken for one without: it takes longer, so the next one is planned too early.

    Args:
        step: Launches a step and returns the result of the one before it, when that has ended.
        clock: Tells the time in seconds.
    """

    def __init__(self, step: Callable[[StepPlan], StepResult | None], clock: Callable[[], float]) -> None:
        self._step = step
        self._clock = clock
        self._durations_s: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._num_measured = 0
        self._began_at = clock()
        self._only_decodes = False
        self._num_decode = 0

    def spare_s(self) -> float:
        """Tell for how long the next step need not be planned yet; 0 or less: it is time."""
        if self._num_measured % _REMEMBERED_STEPS == 0:
            return 0.0
        lead_s = _LEAD_S + _LEAD_PER_ROW_S * self._num_decode
        return self._began_at + min(self._durations_s) - lead_s - self._clock()

    def step(self, plan: StepPlan) -> StepResult | None:
        """Launch a step, wait for the one before it and return its result."""
        launched_at = self._clock()
        result = self._step(plan)
        now = self._clock()
        if result is None:  # nothing was running: what ran before says little about what comes
            self._durations_s.clear()
            self._num_measured = 0
        elif self._only_decodes:
            self._durations_s.append(now - self._began_at)
            self._num_measured += 1
        self._began_at = launched_at if result is None else now
        self._only_decodes = not plan.prefill_rows
        self._num_decode = count_int32(plan.decode_rows)
        return result
