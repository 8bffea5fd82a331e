"""What a worker has done: counters, and on request a trace of the GPU that shows how long it did nothing."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

_SHOWN_KERNELS = 40
_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


class WorkerStats(msgspec.Struct, frozen=True):
    """Counters since the start.

    Attributes:
        num_steps: Steps launched.
        launch_s: Time it took to launch them, the decoding of their plans included.
        gpu_reserved_bytes: Memory that torch holds on the GPU.
    """

    num_steps: int
    launch_s: float
    gpu_reserved_bytes: int


def gpu_reserved_bytes() -> int:
    """Memory that torch holds on this process's GPU; 0 without one."""
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]


class KernelTime(msgspec.Struct, frozen=True):
    """All launches of one kernel."""

    name: str
    count: int
    total_ms: float


class GpuProfile(msgspec.Struct, frozen=True):
    """What the GPU did between the first and the last thing it did.

    Attributes:
        span_ms: That time.
        busy_ms: Time in which at least one kernel or copy ran.
        kernels: Those that took most of it.
    """

    span_ms: float
    busy_ms: float
    kernels: list[KernelTime]


class GpuProfiler:
    """Records from the moment it is made."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()

    def stop(self, path: Path) -> GpuProfile:
        """Stop recording, write the trace for Chrome's viewer to ``path``, and sum it up."""
        torch.cuda.synchronize()
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))
        return summarize(read_gpu_events(path))


class _Event(msgspec.Struct):
    name: str
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]  # as Chrome's format spells it


GpuEvent: TypeAlias = tuple[float, float, str]
"""Start and end in µs, and the kernel's name."""


def read_gpu_events(path: Path) -> list[GpuEvent]:
    """Read what the GPU did from a trace that ``GpuProfiler`` has written, in order of start."""
    trace = msgspec.json.decode(path.read_bytes(), type=_Trace)
    return sorted((e.ts, e.ts + e.dur, e.name) for e in trace.traceEvents if e.cat in _GPU_CATEGORIES)


def summarize(events: Iterable[GpuEvent]) -> GpuProfile:
    """Sum up intervals of work."""
    ordered = sorted(events)
    if not ordered:
        return GpuProfile(0.0, 0.0, [])
    busy, done_until = 0.0, ordered[0][0]
    totals: dict[str, list[float]] = defaultdict(list)
    for start, end, name in ordered:
        busy += max(0.0, end - max(start, done_until))
        done_until = max(done_until, end)
        totals[name].append(end - start)
    kernels = [KernelTime(name, len(times), sum(times) / 1000) for name, times in totals.items()]
    kernels.sort(key=lambda kernel: -kernel.total_ms)
    return GpuProfile((done_until - ordered[0][0]) / 1000, busy / 1000, kernels[:_SHOWN_KERNELS])
