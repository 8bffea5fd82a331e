"""From what became of each request to the figures of the whole run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmark.messages import Outcome
from benchmark.prompt import Prompt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Distribution:
    """A latency over requests or tokens, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class LatencyLimits:
    """What a request must keep to count as good, in milliseconds; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def given(self) -> bool:
        """Whether there is any limit."""
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.e2e_ms))


@dataclass(frozen=True)
class Timing:
    """Latencies of one request that is done.

    Attributes:
        prompt_tokens: By usage, else as sent.
        output_tokens: By usage, else one per event with output.
        by_usage: ``output_tokens`` is the server's own count.
        ttft_ms: From sending to the first output.
        tpot_ms: From the first output to the last, per token that came after the first output; None when none did.
        e2e_ms: From sending until the server said it was finished.
        itl_ms: [num_reads - 1] time per token of each later read: the gap before it, over its tokens.
        itl_weights: [num_reads - 1] tokens of that read.
    """

    prompt_tokens: int
    output_tokens: int
    by_usage: bool
    ttft_ms: float
    tpot_ms: float | None
    e2e_ms: float
    itl_ms: Floats
    itl_weights: Floats


@dataclass(frozen=True)
class Summary:
    """The figures of a run. Latencies are of the requests that are done; failed ones still took of the duration.

    Attributes:
        duration_s: From the first request sent to the last one ended, failed ones included.
        failures: Number of failed requests by kind.
        failure_details: What was said about the first failure of each kind.
        prompt_tokens: Of the requests that are done.
        output_tokens: Of the requests that are done.
        output_tokens_by: Requests by how their output tokens were counted: ``usage``, or ``events`` where the server
            sent no usage.
        short_answers: Done with fewer tokens than asked for.
        answers_without_text: Done, with tokens but no text.
        request_throughput: Requests done per second.
        failed_throughput: Requests failed per second.
        goodput: Requests per second that kept every limit; None without limits.
    """

    duration_s: float
    num_requests: int
    num_done: int
    failures: dict[str, int]
    failure_details: dict[str, str]
    prompt_tokens: int
    output_tokens: int
    output_tokens_by: dict[str, int]
    short_answers: int
    answers_without_text: int
    request_throughput: float
    failed_throughput: float
    output_throughput: float
    total_throughput: float
    goodput: float | None
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None

    @property
    def num_failed(self) -> int:
        """Number of failed requests."""
        return self.num_requests - self.num_done


def summarize(outcomes: Sequence[Outcome], prompts: Sequence[Prompt], limits: LatencyLimits) -> Summary:
    """Compute the figures of a run.

    Args:
        outcomes: At least one; ``index`` points into ``prompts``.
        limits: For the goodput.
    """
    done = [outcome for outcome in outcomes if outcome.failure is None]
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    timings = [time_request(outcome, prompts[outcome.index].prompt_len) for outcome in done]
    duration_s = max(o.end_s for o in outcomes) - min(o.start_s for o in outcomes)
    prompt_tokens = sum(t.prompt_tokens for t in timings)
    output_tokens = sum(t.output_tokens for t in timings)
    return Summary(
        duration_s=duration_s,
        num_requests=len(outcomes),
        num_done=len(done),
        failures=dict(Counter(str(o.failure) for o in failed)),
        failure_details={str(o.failure): o.detail for o in reversed(failed)},
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_by=dict(Counter("usage" if t.by_usage else "events" for t in timings)),
        short_answers=sum(t.output_tokens < prompts[o.index].output_len for o, t in zip(done, timings, strict=True)),
        answers_without_text=sum(not o.has_text for o in done),
        request_throughput=len(done) / duration_s,
        failed_throughput=len(failed) / duration_s,
        output_throughput=output_tokens / duration_s,
        total_throughput=(prompt_tokens + output_tokens) / duration_s,
        goodput=sum(_is_good(t, limits) for t in timings) / duration_s if limits.given else None,
        ttft_ms=_distribution([t.ttft_ms for t in timings]),
        tpot_ms=_distribution([t.tpot_ms for t in timings if t.tpot_ms is not None]),
        itl_ms=weighted_distribution([t.itl_ms for t in timings], [t.itl_weights for t in timings]),
        e2e_ms=_distribution([t.e2e_ms for t in timings]),
    )


def time_request(outcome: Outcome, prompt_len: int) -> Timing:
    """Compute the latencies of a request that is done."""
    times = np.frombuffer(outcome.chunk_times) * 1e3
    tokens = chunk_tokens(outcome)
    gaps, later = np.diff(times), tokens[1:]
    brought = later > 0
    num_later = float(later.sum())
    return Timing(
        prompt_tokens=prompt_len if outcome.prompt_tokens is None else outcome.prompt_tokens,
        output_tokens=_output_tokens(outcome),
        by_usage=outcome.output_tokens is not None,
        ttft_ms=float(times[0]) - outcome.start_s * 1e3,
        tpot_ms=float(times[-1] - times[0]) / num_later if num_later > 0 else None,
        e2e_ms=(outcome.end_s - outcome.start_s) * 1e3,
        itl_ms=gaps[brought] / later[brought],
        itl_weights=later[brought],
    )


def _output_tokens(outcome: Outcome) -> int:
    if outcome.output_tokens is not None:
        return outcome.output_tokens
    return round(float(np.frombuffer(outcome.chunk_events).sum()))


def chunk_tokens(outcome: Outcome) -> Floats:
    """Return [num_reads] tokens of each read: exact where usage came with every event, else the total spread evenly."""
    usage, events = np.frombuffer(outcome.chunk_usage), np.frombuffer(outcome.chunk_events)
    if usage[0] > 0:
        return np.diff(usage, prepend=0.0)
    return events * (_output_tokens(outcome) / float(events.sum()))


def _is_good(timing: Timing, limits: LatencyLimits) -> bool:
    pairs = (
        (timing.ttft_ms, limits.ttft_ms),
        (timing.tpot_ms, limits.tpot_ms),
        (timing.e2e_ms, limits.e2e_ms),
    )
    return all(value is None or limit is None or value <= limit for value, limit in pairs)


def _distribution(values: list[float]) -> Distribution | None:
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return Distribution(float(np.mean(values)), float(p50), float(p90), float(p99))


def weighted_distribution(parts: list[Floats], part_weights: list[Floats]) -> Distribution | None:
    """Sum up the values of all parts, each of which counts as often as its weight says; None when there are none."""
    values = np.concatenate(parts) if parts else np.empty(0)
    if not values.size:
        return None
    weights = np.concatenate(part_weights)
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    # The smallest value that at least this share of the tokens did not exceed.
    places = np.searchsorted(reached, np.array((0.5, 0.9, 0.99)) * reached[-1])
    p50, p90, p99 = values[order][np.minimum(places, values.size - 1)]
    return Distribution(float(np.average(values, weights=weights)), float(p50), float(p90), float(p99))
