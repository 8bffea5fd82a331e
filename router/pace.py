"""When to plan the next step: as late as the device allows.

A step that is launched while another one runs starts when that one ends. To plan it at once would shut out the requests
that come while the other runs, for a whole step more; to plan it too late would leave the device idle. So the router
goes on receiving until shortly before the running step will end. A request then waits for 0.8 steps on average before
it runs, instead of 1.5.

How early is early enough differs from machine to machine: a CPU that computes the steps itself comes late to plan them.
So the worker says when the device had to wait, and the next steps are planned earlier.
"""

from collections import deque
from collections.abc import Callable

from lightserve.ipc.messages import StepPlan, StepResult, count_int32

_REMEMBERED_STEPS = 8  # the shortest of these counts: steps are even, and too early is the better side to err on
_LEAST_REMEMBERED = 2  # the first step after a pause may be far longer than those that follow
# To plan a step, send it and launch it takes 0.6 to 1 ms for few rows, half of it the worker's, 3 ms for a thousand.
_LEAST_LEAD_S = 0.0015
_MOST_LEAD_S = 1.0
_LEAD_GROWTH, _LEAD_DECAY = 1.5, 0.99  # after each wait, and with each step without: one in forty waits at most


class Pace:
    """Measures steps of decode rows, and predicts when the running one ends.

    A step with prompts in it is taken for one without: it takes longer, so the next one is planned too early. With
    less than half the rows of those measured a step is expected to be shorter in proportion; with more than half to
    last as long, for mostly it does, and a little too early each time would cost more than too late once.

    Args:
        step: Launches a step and returns the result of the one before it, when that has ended.
        clock: Tells the time in seconds.
    """

    def __init__(self, step: Callable[[StepPlan], StepResult | None], clock: Callable[[], float]) -> None:
        self._step = step
        self._clock = clock
        self._lead_s = _LEAST_LEAD_S
        self._steps: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED_STEPS)  # how long, of how many rows
        self._began_at = clock()
        self._only_decodes = False
        self._num_decode = 0

    def spare_s(self) -> float:
        """Tell for how long the next step need not be planned yet; 0 or less: it is time."""
        if len(self._steps) < _LEAST_REMEMBERED:
            return 0.0
        shortest_s = min(duration_s * min(1.0, 2 * self._num_decode / num_rows) for duration_s, num_rows in self._steps)
        return self._began_at + shortest_s - self._lead_s - self._clock()

    def step(self, plan: StepPlan) -> StepResult | None:
        """Launch a step, wait for the one before it and return its result."""
        launched_at = self._clock()
        result = self._step(plan)
        now = self._clock()
        if result is None:  # nothing was running: what ran before says little about what comes
            self._steps.clear()
        else:
            self._learn(now - self._began_at, device_waited=result.device_waited)
        self._began_at = launched_at if result is None else now
        self._only_decodes = bool(plan.decode_rows) and not plan.prefill_rows
        self._num_decode = count_int32(plan.decode_rows)
        return result

    def _learn(self, duration_s: float, *, device_waited: bool) -> None:
        """Take in a step that has ended. When the device waited nobody saw its end: what it took is not known."""
        if device_waited:
            self._steps.clear()
            self._lead_s = min(self._lead_s * _LEAD_GROWTH, _MOST_LEAD_S)
            return
        self._lead_s = max(self._lead_s * _LEAD_DECAY, _LEAST_LEAD_S)
        if self._only_decodes:
            self._steps.append((duration_s, self._num_decode))
