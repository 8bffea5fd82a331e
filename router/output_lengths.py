"""How long answers get: the survival function of recent output lengths."""

import numpy as np

from lightserve.router.arrays import FloatArray, IntArray


class OutputLengths:
    """A sliding window of requests that have ended, read as Kaplan and Meier do.

    A request that was cut off, or still runs, says only that its answer is longer than that. Without such readings the
    estimate would be too short at first, as short answers end early, and wherever clients ask for few tokens.

    Args:
        window: Ended requests that are remembered.
    """

    def __init__(self, window: int) -> None:
        self._lengths = np.zeros(window, dtype=np.int64)
        self._is_natural = np.zeros(window, dtype=np.bool_)
        self.num_seen = 0

    def add(self, length: int, *, is_natural: bool) -> None:
        """Remember a request that has ended; naturally, or by a limit."""
        place = self.num_seen % len(self._lengths)
        self._lengths[place] = length
        self._is_natural[place] = is_natural
        self.num_seen += 1

    def survival(self, running: IntArray) -> FloatArray:
        """Estimate P(L > l), the chance that an answer is longer than l.

        Args:
            running: [num_running], lengths that those who run have reached.

        Returns:
            [n + 1] for l from 0 to the longest length ever reached, where n is that length; beyond, nothing is known.
            One more is counted at risk at each length than was seen: what never happened is not impossible.
        """
        num_known = min(self.num_seen, len(self._lengths))
        ended, is_natural = self._lengths[:num_known], self._is_natural[:num_known]
        longest = int(max(ended.max(initial=0), running.max(initial=0)))
        counts = np.bincount(np.concatenate([ended, running]), minlength=longest + 1)
        at_risk = counts[::-1].cumsum()[::-1]  # with length >= l
        ends = np.bincount(ended[is_natural], minlength=longest + 1)
        survival: FloatArray = (1 - ends / (at_risk + 1)).cumprod()
        return survival
