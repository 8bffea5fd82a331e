"""What this machine, or the container we are in, lets us use: memory and CPUs."""

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """Memory that can still be taken without swapping."""
    return min(limit for limit in (_free_in_machine(), _free_in_container()) if limit is not None)


def num_usable_cpus() -> int:
    """Physical cores this process may run on: two threads of one core do not multiply faster than one."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len({_core_of(cpu) for cpu in allowed})
    quota = _cpu_quota_of_container()
    return cores if quota is None else min(cores, quota)


def _free_in_machine() -> int:
    if not _MEMINFO.exists():
        # Other systems than Linux do not say what is available; half of all is a guess on the safe side.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _free_in_container() -> int | None:
    limit = _read(_CGROUP / "memory.max")
    return None if limit in ("", "max") else max(0, int(limit) - int(_read(_CGROUP / "memory.current")))


def _cpu_quota_of_container() -> int | None:
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return None if quota in ("", "max") else max(1, int(quota) // int(period))


def _core_of(cpu: int) -> str:
    return _read(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or str(cpu)


def _read(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""
