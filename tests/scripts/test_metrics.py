from typing import Any

import numpy as np
import pytest
from benchmark.messages import Outcome
from benchmark.metrics import LatencyLimits, summarize, time_request
from benchmark.prompt import Prompt


def _outcome(
    times: list[float], events: list[int] | None = None, usage: list[int] | None = None, **more: Any
) -> Outcome:
    facts: dict[str, Any] = {
        "index": 0,
        "start_s": 0.0,
        "end_s": times[-1] if times else 1.0,
        "failure": None,
        "detail": "",
        "output_tokens": None,
        "prompt_tokens": None,
        "has_text": True,
        "chunk_times": np.array(times, dtype=np.float64).tobytes(),
        "chunk_events": np.array(events or [1] * len(times), dtype=np.float64).tobytes(),
        "chunk_usage": np.array(usage or [0] * len(times), dtype=np.float64).tobytes(),
    }
    return Outcome(**(facts | more))


def _prompts(count: int, output_len: int = 4) -> list[Prompt]:
    return [Prompt("", 10, output_len)] * count


def test_usage_counts_the_tokens_whatever_the_events_are() -> None:
    # 20 events of 5 tokens, 100 ms apart: 20 ms per token.
    times = [1 + 0.1 * i for i in range(20)]
    timing = time_request(_outcome(times, output_tokens=100), prompt_len=10)
    assert timing.output_tokens == 100
    assert timing.tpot_ms == pytest.approx(20)
    assert timing.itl_ms == pytest.approx(np.full(19, 20.0))
    assert timing.itl_weights.sum() == 95


def test_cumulative_usage_says_the_tokens_of_each_event() -> None:
    timing = time_request(_outcome([1, 1.1, 1.4], usage=[1, 2, 5], output_tokens=5), prompt_len=10)
    assert timing.itl_ms == pytest.approx([100, 100])
    assert list(timing.itl_weights) == [1, 3]
    assert timing.tpot_ms == pytest.approx(100)


def test_inter_token_latency_is_weighted_by_tokens() -> None:
    outcome = _outcome([1, 1.001, 2.001], usage=[1, 2, 102], output_tokens=102)
    itl = summarize([outcome], _prompts(1, 102), LatencyLimits()).itl_ms
    assert itl is not None
    assert itl.p50 == pytest.approx(10)
    assert itl.mean == pytest.approx((1 + 100 * 10) / 101)


def test_without_usage_each_event_is_one_token_and_the_report_says_so() -> None:
    summary = summarize([_outcome([1, 2, 3])], _prompts(1, 3), LatencyLimits())
    assert summary.output_tokens == 3
    assert summary.output_tokens_by == {"events": 1}


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    timing = time_request(_outcome([0.5], output_tokens=1), prompt_len=10)
    assert timing.ttft_ms == 500
    assert timing.tpot_ms is None
    assert timing.itl_ms.size == 0


def test_failed_requests_count_in_the_duration_but_not_in_latency_or_throughput() -> None:
    done = _outcome([1.0, 2.0], output_tokens=2, prompt_tokens=7)
    refused = _outcome([], index=1, end_s=0.01, failure="http_503", detail="full")
    broken = _outcome([1.0], index=2, end_s=10.0, failure="disconnected", detail="closed")
    summary = summarize([done, refused, broken], _prompts(3), LatencyLimits())
    assert (summary.num_done, summary.num_failed) == (1, 2)
    assert summary.failures == {"http_503": 1, "disconnected": 1}
    assert summary.failure_details == {"http_503": "full", "disconnected": "closed"}
    assert summary.duration_s == 10.0
    assert summary.request_throughput == pytest.approx(0.1)
    assert summary.failed_throughput == pytest.approx(0.2)
    assert summary.output_throughput == pytest.approx(0.2)
    assert summary.total_throughput == pytest.approx(0.9)
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.mean == 1000
    assert summary.short_answers == 1


def test_a_run_in_which_all_failed_has_no_latencies() -> None:
    summary = summarize([_outcome([], failure="connect")], _prompts(1), LatencyLimits(ttft_ms=1))
    assert summary.ttft_ms is summary.tpot_ms is summary.itl_ms is summary.e2e_ms is None
    assert summary.goodput == 0


def test_goodput_counts_the_requests_that_keep_every_limit() -> None:
    quick = _outcome([0.1, 0.2], output_tokens=2)
    late = _outcome([5.0, 5.1], index=1, output_tokens=2)
    slow = _outcome([0.1, 4.1], index=2, output_tokens=2)
    summary = summarize([quick, late, slow], _prompts(3), LatencyLimits(ttft_ms=1000, tpot_ms=500))
    assert summary.goodput == pytest.approx(1 / summary.duration_s)
