"""Processor time of other processes, looked up again and again while they work (Linux)."""

import os
import threading
import time
from pathlib import Path

import numpy as np

_PERIOD_S = 0.1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CLIENT_MODULE = "benchmark.client_process"
_TITLE = "lightserve "


class CpuTimes:
    """Watches a server's processes and this process's load generators, on a thread, while the block lasts.

    Args:
        server_pid: The launcher's.
    """

    def __init__(self, server_pid: int) -> None:
        self._server_pid = server_pid
        self._samples: dict[str, list[tuple[float, float]]] = {}  # (monotonic time, processor time) by name
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "CpuTimes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def core_fracs(self, start_s: float, end_s: float) -> dict[str, float]:
        """Tell which share of a core each process used between two times (``time.monotonic``)."""
        return {name: core_frac(samples, start_s, end_s) for name, samples in sorted(self._samples.items())}

    def _watch(self) -> None:
        while not self._end.wait(_PERIOD_S):
            for name, pid in self._processes().items():
                try:
                    sample = time.monotonic(), cpu_seconds(pid)
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it has just ended
                self._samples.setdefault(name, []).append(sample)

    def _processes(self) -> dict[str, int]:
        server = {title(pid).removeprefix(_TITLE): pid for pid in children_of(self._server_pid)}
        clients = [pid for pid in children_of(os.getpid()) if _CLIENT_MODULE in title(pid)]
        return server | {f"client-{i}": pid for i, pid in enumerate(sorted(clients))}


def core_frac(samples: list[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Tell which share of a core was used between two times, from samples of (time, processor time so far)."""
    times, used = np.array(samples).T
    before, after = np.interp((start_s, end_s), times, used)
    return float((after - before) / (end_s - start_s))


def cpu_seconds(pid: int) -> float:
    """Tell how much processor time all threads of a process have used."""
    # The command's name, in parentheses, may hold anything; what follows it is the state, then numbers.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def children_of(pid: int) -> list[int]:
    """Tell a process's children; those that its other threads have started are not among them."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def title(pid: int) -> str:
    """Tell a process's command line, or what it has called itself instead; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
