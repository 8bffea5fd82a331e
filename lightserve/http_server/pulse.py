"""Signs of life of the engine while requests wait for it: how long it has been silent, and whether that is too long.

Every step of the router that changes anything is heard of. How long a step may take depends on model and machine (512
prompt tokens of an 8B model on a laptop's CPU: over a minute), so the limit follows the longest one of late.
"""

import time
from collections.abc import Callable

LEAST_LIMIT_S = 20.0
_MOST_LIMIT_S = 600.0
_PATIENCE = 4  # times the longest silence that ended well
_FADING = 0.9995  # of what is remembered, with each sign of life: a hiccup is forgotten after a few thousand steps


class Pulse:
    """The engine's signs of life.

    Args:
        clock: Tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_at = clock()
        self._longest_s = 0.0

    def start(self) -> None:
        """Begin to listen: an idle engine had nothing to say."""
        self._heard_at = self._clock()

    def hear(self) -> None:
        """Note a sign of life while requests wait."""
        self._longest_s = max(_FADING * self._longest_s, self.silence_s)
        self.start()

    @property
    def silence_s(self) -> float:
        """How long nothing has been heard."""
        return self._clock() - self._heard_at

    @property
    def limit_s(self) -> float:
        """How long a silence is no reason to worry."""
        return min(max(LEAST_LIMIT_S, _PATIENCE * self._longest_s), _MOST_LIMIT_S)
