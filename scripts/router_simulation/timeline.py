"""What the router holds, step by step."""

from array import array

import numpy as np

from lightserve.router.arrays import FloatArray


class Timeline:
    """Slots in use, and running and waiting requests, at the begin of each step."""

    def __init__(self) -> None:
        self._times_s = array("d")
        self._slots = array("d")
        self._running = array("d")
        self._waiting = array("d")

    def note(self, now_s: float, slots: int, running: int, waiting: int) -> None:
        """Add a step."""
        self._times_s.append(now_s)
        self._slots.append(slots)
        self._running.append(running)
        self._waiting.append(waiting)

    @property
    def times_s(self) -> FloatArray:
        """[num_steps]."""
        return np.asarray(self._times_s)

    @property
    def slots(self) -> FloatArray:
        """[num_steps]."""
        return np.asarray(self._slots)

    @property
    def running(self) -> FloatArray:
        """[num_steps]."""
        return np.asarray(self._running)

    @property
    def waiting(self) -> FloatArray:
        """[num_steps]."""
        return np.asarray(self._waiting)

    def mean_slots(self, *, while_waiting: bool) -> float:
        """Tell the mean of the slots in use over time; 0 if there is no such time."""
        spans = np.diff(self.times_s)
        if while_waiting:
            spans = spans * (self.waiting[:-1] > 0)
        total = float(spans.sum())
        return float((spans * self.slots[:-1]).sum() / total) if total else 0.0
