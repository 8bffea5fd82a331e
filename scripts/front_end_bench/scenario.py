"""How many streams there are, how long they are, and how fast the model worker asks the front end to be."""

import math
from dataclasses import dataclass

import numpy as np
from benchmark.traces import TraceRow

# Steps of a batch that is not full yet: long, so that the first streams do not end before the last ones begin.
FILLING_STEP_S = 0.25
# Share of its rows from which on a batch counts as full: where streams come and go, a few are between two of them.
FULL_FRAC = 0.95
_FILLING_S = 15.0  # what a busy machine may take to begin 3,000 streams
_SHORT_PROMPT = 16
# Means of the ShareGPT-like trace: a stream has as many prompt tokens as output tokens.
_PROMPT_PER_OUTPUT = 216 / 209


@dataclass(frozen=True)
class Scenario:
    """One run.

    Attributes:
        name: What it is called.
        num_running: Requests that may run at once.
        step_s: How long a step of a full batch takes; 0: no time.
        lengths: Of each stream's prompt and answer.
    """

    name: str
    num_running: int
    step_s: float
    lengths: list[TraceRow]

    @property
    def asked_tokens_per_s(self) -> float | None:
        """Tokens that a full batch makes in a second; None when nothing but the front end bounds them."""
        return self.num_running / self.step_s if self.step_s else None

    @property
    def num_full(self) -> int:
        """Streams from which on the batch counts as full."""
        return math.ceil(FULL_FRAC * self.num_running)

    @property
    def max_total_token_num(self) -> int:
        """Slots enough for any of these streams to run beside any others."""
        return self.num_running * max(row.prompt_len + row.output_len for row in self.lengths)


def make_scenario(name: str, num_streams: int, tokens_per_s: float, seconds: float) -> Scenario:
    """Make one of ``SCENARIOS``.

    Args:
        num_streams: Streams that are open at once.
        tokens_per_s: The worker's pace.
        seconds: How long the full batch runs, about.
    """
    return SCENARIOS[name](num_streams, tokens_per_s, seconds)


def _steady(num_streams: int, tokens_per_s: float, seconds: float) -> Scenario:
    """All streams decode at once."""
    step_s = num_streams / tokens_per_s
    output_len = max(1, round(seconds / step_s + _FILLING_S / max(step_s, FILLING_STEP_S)))
    return Scenario("steady", num_streams, step_s, [TraceRow(_SHORT_PROMPT, output_len)] * num_streams)


def _crowd(num_streams: int, tokens_per_s: float, seconds: float) -> Scenario:
    """A third of the streams decode, the others wait, and whenever one ends another begins."""
    num_running = max(1, num_streams // 3)
    mean_len = max(2.0, seconds * tokens_per_s / num_streams)
    rng = np.random.default_rng(0)
    output_lens = rng.integers(1, round(2 * mean_len), num_streams).tolist()
    prompt_lens = rng.integers(1, round(2 * mean_len * _PROMPT_PER_OUTPUT), num_streams).tolist()
    lengths = [TraceRow(prompt, output) for prompt, output in zip(prompt_lens, output_lens, strict=True)]
    return Scenario("crowd", num_running, num_running / tokens_per_s, lengths)


def _limit(num_streams: int, tokens_per_s: float, seconds: float) -> Scenario:
    """All streams decode at once and a step takes no time: the answers are as long as those of ``steady``."""
    steady = _steady(num_streams, tokens_per_s, seconds)
    return Scenario("limit", num_streams, 0.0, steady.lengths)


SCENARIOS = {"steady": _steady, "crowd": _crowd, "limit": _limit}
