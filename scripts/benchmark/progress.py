"""What the user sees while the load runs."""

import time
from collections.abc import Callable
from typing import TextIO

from benchmark.messages import Progress

_INTERVAL_S = 5.0  # between two lines of a log; a terminal's one line is always new
_WIDTH = 60


class ProgressLines:
    """Says where a run stands: on a terminal in one line, elsewhere in a line every 5 s.

    Args:
        stream: Where to.
        what: Is running.
        clock: The time in seconds.
    """

    def __init__(self, stream: TextIO, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._what = what
        self._clock = clock
        self._next_s = clock() + _INTERVAL_S

    def show(self, progress: Progress) -> None:
        """Say it, if it is time."""
        text = f"{self._what}: {progress.num_done} done, {progress.num_failed} failed, {progress.num_open} open"
        if self._stream.isatty():
            print(f"\r{text:<{_WIDTH}}", end="\r", file=self._stream, flush=True)
        elif self._clock() >= self._next_s:
            self._next_s = self._clock() + _INTERVAL_S
            print(text, file=self._stream, flush=True)
