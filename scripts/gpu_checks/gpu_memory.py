"""Memory in use on the GPUs, asked of the driver without making a context, which would take memory itself."""

import os
import subprocess
from collections.abc import Collection


def used_mib() -> int:
    """MiB in use, by every process and by the driver, on all GPUs together that this process may use.

    Raises:
        subprocess.CalledProcessError: The driver does not answer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    lines = _ask("--query-gpu=memory.used", *([f"--id={visible}"] if visible else []))
    return sum(int(line) for line in lines)


def used_mib_of(pids: Collection[int]) -> int:
    """MiB in use by these processes; by all there are, where the driver does not know these or how much they use.

    Raises:
        subprocess.CalledProcessError: The driver does not answer.
    """
    fields = [line.split(", ") for line in _ask("--query-compute-apps=pid,used_memory")]
    used = [mib for pid, mib in fields if pid.isdecimal() and int(pid) in pids]
    return sum(map(int, used)) if used and all(mib.isdecimal() for mib in used) else used_mib()


def _ask(*query: str) -> list[str]:
    command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
