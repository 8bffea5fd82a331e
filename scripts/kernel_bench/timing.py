"""Times on a CUDA device, and the two rates that nothing on it exceeds."""

from collections.abc import Callable, Sequence
from statistics import median

import torch

from kernel_bench.case import BF16, Case
from kernel_bench.result import Ceilings, Times


def time_case(case: Case, repeats: int) -> Times:
    """Time ours and the vendor's by turns, so that a device that slows down slows both."""
    times = [(_time_runs(case.runs), _time_runs(case.rival) if case.rival else None) for _ in range(repeats)]
    return Times([ours for ours, _ in times], [rival for _, rival in times if rival is not None])


def measure_ceilings(repeats: int) -> Ceilings:
    """Measure a large copy (bytes read plus written) and a large bfloat16 product."""
    return Ceilings(
        copy_tb_s=median(_measure_copy() for _ in range(repeats)),
        product_tflop_s=median(_measure_product() for _ in range(repeats)),
    )


def _time_runs(runs: Sequence[Callable[[], object]], replays: int = 9) -> float:
    """Capture the runs in one graph; give the median time of one, in µs."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    return _time_events(graph.replay, replays) / len(runs)


def _time_events(work: Callable[[], object], repeats: int) -> float:
    """Give the median time of ``work``, in µs."""
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times)


def _measure_copy() -> float:
    source = torch.randn(1 << 30, dtype=BF16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _time_events(lambda: target.copy_(source), 12) / 1e6


def _measure_product() -> float:
    a, b = torch.randn(8192, 8192, dtype=BF16), torch.randn(8192, 8192, dtype=BF16)
    return 2 * 8192**3 / _time_events(lambda: a @ b, 12) / 1e6
