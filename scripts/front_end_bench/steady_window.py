"""What was delivered while the batch was full: the beginning and the end of a run are left out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from benchmark.messages import Outcome
from benchmark.metrics import Distribution, Floats, chunk_tokens, weighted_distribution


class NoWindowError(Exception):
    """The batch was never full."""


@dataclass(frozen=True)
class Window:
    """A stretch of time on ``time.monotonic``, [start_s, end_s)."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """How long it is."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Delivery:
    """What clients read within a window.

    Attributes:
        tokens_per_s: Output tokens.
        tokens_per_read: How many tokens came together; 1 where clients get each token as soon as it is there.
        itl_ms: Gap before each token, as ``benchmark.metrics`` has it: several in one read share its gap.
        gap_ms: Gap before each read.
    """

    tokens_per_s: float
    tokens_per_read: float
    itl_ms: Distribution
    gap_ms: Distribution


def full_window(outcomes: Sequence[Outcome], num_full: int) -> Window:
    """Find the time from the first to the last moment at which so many streams were open.

    Raises:
        NoWindowError: There is none.
    """
    reads = [_times(outcome) for outcome in outcomes if outcome.chunk_times]
    changes = np.array([times[0] for times in reads] + [times[-1] for times in reads])
    order = np.argsort(changes, kind="stable")
    num_open = np.cumsum(np.where(order < len(reads), 1, -1))
    full = np.flatnonzero(num_open >= num_full)
    if not full.size:
        raise NoWindowError(f"{num_full} streams were never open at once")
    moments = changes[order]
    return Window(float(moments[full[0]]), float(moments[full[-1] + 1]))


def measure_delivery(outcomes: Sequence[Outcome], window: Window) -> Delivery:
    """Sum up what came within a window.

    Raises:
        NoWindowError: No stream brought more than one read.
    """
    gaps_ms: list[Floats] = []
    gap_tokens: list[Floats] = []
    num_tokens, num_reads = 0.0, 0
    for outcome in outcomes:
        if outcome.chunk_times:
            times, tokens = _times(outcome), chunk_tokens(outcome)
            counts = (times >= window.start_s) & (times < window.end_s) & (tokens > 0)
            num_tokens += float(tokens[counts].sum())
            num_reads += int(counts.sum())
            counts[0] = False  # there is no gap before it
            gaps_ms.append(1000 * np.diff(times, prepend=times[0])[counts])
            gap_tokens.append(tokens[counts])
    gap_ms = weighted_distribution(gaps_ms, [np.ones(len(part)) for part in gaps_ms])
    itl_ms = weighted_distribution([gap / num for gap, num in zip(gaps_ms, gap_tokens, strict=True)], gap_tokens)
    if gap_ms is None or itl_ms is None:
        raise NoWindowError("no stream brought a second token while the batch was full")
    return Delivery(num_tokens / window.duration_s, num_tokens / num_reads, itl_ms, gap_ms)


def _times(outcome: Outcome) -> Floats:
    return np.frombuffer(outcome.chunk_times)
