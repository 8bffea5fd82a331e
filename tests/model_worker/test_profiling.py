"""The summary of a trace."""

import pytest

from lightserve.model_worker.profiling import summarize


def test_time_counts_as_busy_once_however_many_kernels_run() -> None:
    found = summarize([(300.0, 400.0, "b"), (0.0, 100.0, "a"), (50.0, 200.0, "b"), (60.0, 70.0, "a")])
    assert found.span_ms == pytest.approx(0.4)
    assert found.busy_ms == pytest.approx(0.3)
    assert [(kernel.name, kernel.count) for kernel in found.kernels] == [("b", 2), ("a", 2)]
    assert [kernel.total_ms for kernel in found.kernels] == pytest.approx([0.25, 0.11])


def test_a_trace_of_nothing_is_summed_up() -> None:
    assert summarize([]).span_ms == 0
