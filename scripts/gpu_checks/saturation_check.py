"""A whole server with more requests than fit, for minutes: memory that stays what it is, and repeated figures."""

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from script_tools.json_file import write_json
from script_tools.load_generator import send_load
from script_tools.running_server import BENCH_FLAGS, running_server

from gpu_checks.gpu_memory import used_mib_of

_CLIENT_FLAGS = ("--client_processes", "4")
_INTERVAL_S = 10.0
# The driver takes memory when a kernel first runs, the processes when the pool and the streams are first full.
_DEVICE_SETTLED_S, _HOST_SETTLED_S = 60.0, 120.0
_DEVICE_SPREAD_MIB = 16
# Of one process. One that loses 1 KiB with each of 3,000 requests, which take 45 s, grows so.
_HOST_GROWTH_MIB_PER_MIN = 4.0


@dataclass(frozen=True)
class Sample:
    """Memory at one moment.

    Attributes:
        at_s: Since the load began.
        device_mib: In use on all GPUs by the server.
        host_mib: Resident, of each process of the server, by its pid and name.
    """

    at_s: float
    device_mib: int
    host_mib: Mapping[str, float]


def saturate(model_dir: Path, trace: Path, minutes: float, folder: Path | None = None) -> bool:
    """Serve random weights and send a trace, all its requests at once, again and again.

    Args:
        model_dir: Folder with the configuration.
        trace: Lengths (CSV); each run draws new ids, so that the prefix cache is of no use.
        minutes: No run begins later; the last one is awaited.
        folder: Where the runs' JSON files and ``memory.json`` are kept.

    Returns:
        Whether no request failed and neither memory grew.
    """
    with (
        tempfile.TemporaryDirectory() as scratch,
        running_server(["--model_dir", str(model_dir), *BENCH_FLAGS]) as server,
    ):
        kept = folder or Path(scratch)
        kept.mkdir(parents=True, exist_ok=True)
        with _sampling(server.pid) as samples:
            runs = list(_run_again_and_again(server.url, trace, time.monotonic() + 60 * minutes, kept))
        write_json(kept / "memory.json", samples)
    print(
        f"{len(runs)} runs: median {median(run.requests_per_s for run in runs):.2f} req/s, "
        f"{median(run.output_tokens_per_s for run in runs):.0f} output tokens/s"
    )
    return all([*(run.num_failed == 0 for run in runs), stays_constant(samples)])


@dataclass(frozen=True)
class _Run:
    requests_per_s: float
    output_tokens_per_s: float
    num_failed: int


def _run_again_and_again(url: str, trace: Path, deadline: float, folder: Path) -> Iterator[_Run]:
    seed = 0
    while time.monotonic() < deadline:
        flags = [*_CLIENT_FLAGS, "--dataset", str(trace), "--seed", str(seed)]
        results = send_load(url, flags, folder / f"run-{seed}.json")["results"]
        run = _Run(results["request_throughput"], results["output_throughput"], sum(results["failures"].values()))
        print(
            f"run {seed}: {run.requests_per_s:.2f} req/s, {run.output_tokens_per_s:.0f} output tokens/s, "
            f"{run.num_failed} failed",
            flush=True,
        )
        yield run
        seed += 1


def stays_constant(samples: Sequence[Sample]) -> bool:
    """Judge the memory: the device's by its spread, each process's by the slope of a line through it. Says both."""
    settled = [sample.device_mib for sample in samples if sample.at_s >= _DEVICE_SETTLED_S]
    late = [sample for sample in samples if sample.at_s >= _HOST_SETTLED_S]
    if len(late) < 3:
        print(f"only {len(late)} samples of memory after {_HOST_SETTLED_S:.0f} s: too few to judge")
        return False
    spread = max(settled) - min(settled)
    print(f"device: {settled[-1]} MiB, within {spread} MiB since {_DEVICE_SETTLED_S:.0f} s")
    slopes = {name: _slope(late, name) for name in late[-1].host_mib}
    for name, slope in slopes.items():
        print(f"{name}: {late[-1].host_mib[name]:.0f} MiB resident, {slope:+.2f} MiB/min")
    same_processes = all(sample.host_mib.keys() == slopes.keys() for sample in samples)
    if not same_processes:
        print("processes came or went")
    is_flat = all(slope <= _HOST_GROWTH_MIB_PER_MIN for slope in slopes.values())
    return spread <= _DEVICE_SPREAD_MIB and is_flat and same_processes


def _slope(samples: Sequence[Sample], name: str) -> float:
    """MiB per minute, by least squares."""
    minutes = [sample.at_s / 60 for sample in samples]
    return float(np.polyfit(minutes, [sample.host_mib.get(name, np.nan) for sample in samples], 1)[0])


@contextmanager
def _sampling(server_pid: int) -> Iterator[list[Sample]]:
    """Take a sample every few seconds, on a thread, until the block ends."""
    samples: list[Sample] = []
    done, start = threading.Event(), time.monotonic()

    def sample() -> None:
        while not done.wait(_INTERVAL_S):
            device_mib = used_mib_of(_processes(server_pid))
            samples.append(Sample(time.monotonic() - start, device_mib, resident_mib(server_pid)))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def resident_mib(launcher_pid: int) -> dict[str, float]:
    """Resident memory of a launcher and of its children, by name and pid."""
    return {
        f"{status['Name']} {pid}": int(status["VmRSS"].split()[0]) / 1024
        for pid, status in _processes(launcher_pid).items()
    }


def _processes(launcher_pid: int) -> dict[int, dict[str, str]]:
    """What the system says of a launcher and of its children that live, by pid."""
    statuses = {int(path.parent.name): _status(path) for path in Path("/proc").glob("[0-9]*/status")}
    return {
        pid: status
        for pid, status in sorted(statuses.items())
        if (pid == launcher_pid or status.get("PPid") == str(launcher_pid)) and "VmRSS" in status
    }


def _status(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}  # it has just ended
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
