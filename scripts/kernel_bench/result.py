"""What was measured of a case, beside the device's ceilings."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kernel_bench.case import TOLERANCE, Case


@dataclass(frozen=True)
class Ceilings:
    """Rates of the device: bytes read plus written by a copy, operations of a product."""

    copy_tb_s: float
    product_tflop_s: float


@dataclass(frozen=True)
class Times:
    """Of one run in µs, one of each repeat; ``rival_us`` is empty where there is no rival."""

    ours_us: Sequence[float]
    rival_us: Sequence[float] = ()


@dataclass(frozen=True)
class Result:
    """What was measured; times are medians of the repeats, between the smallest and the largest.

    Attributes:
        kernel: The name that it is asked for by.
        case: Its sizes.
        error: Against the reference.
        time_us: Of one run.
        rate: In ``unit``, by the median time.
        unit: TB/s or TFLOP/s.
        share: Of the measured ceiling.
        rival_us: Of the same work by the vendor's library; None: there is none.
    """

    kernel: str
    case: str
    error: float
    time_us: float
    smallest_us: float
    largest_us: float
    rate: float
    unit: str
    share: float
    rival_us: float | None
    rival_smallest_us: float | None
    rival_largest_us: float | None

    @property
    def is_wrong(self) -> bool:
        """Whether the kernel does not do what its reference does."""
        return not self.error <= TOLERANCE  # NaN is


def summarize(kernel: str, case: Case, error: float, times: Times, ceilings: Ceilings) -> Result:
    time_us = median(times.ours_us)
    rate, unit, ceiling = (
        (case.flops / time_us / 1e6, "TFLOP/s", ceilings.product_tflop_s)
        if case.flops
        else (case.bytes / time_us / 1e6, "TB/s", ceilings.copy_tb_s)
    )
    return Result(
        kernel=kernel,
        case=case.name,
        error=error,
        time_us=time_us,
        smallest_us=min(times.ours_us),
        largest_us=max(times.ours_us),
        rate=rate,
        unit=unit,
        share=rate / ceiling,
        rival_us=median(times.rival_us) if times.rival_us else None,
        rival_smallest_us=min(times.rival_us, default=None),
        rival_largest_us=max(times.rival_us, default=None),
    )


def format_result(result: Result) -> str:
    rival = "" if result.rival_us is None else f"   cuBLAS {result.rival_us:.1f} µs"
    return (
        f"{result.kernel:18} {result.case:28} error {result.error:.1e} {result.time_us:9.1f} µs "
        f"{result.rate:7.2f} {result.unit:7} {result.share:6.1%}{rival}"
    )
