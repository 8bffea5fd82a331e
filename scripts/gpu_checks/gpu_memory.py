"""Memory in use on the GPUs, asked of the driver without making a context, which would take memory itself."""

import os
import subprocess

_QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


def used_mib() -> int:
    """MiB in use, by every process and by the driver, on all GPUs together that this process may use.

    Raises:
        subprocess.CalledProcessError: The driver does not answer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [f"--id={visible}"] if visible else []
    lines = subprocess.run([*_QUERY, *chosen], check=True, capture_output=True, text=True).stdout.split()
    return sum(int(line) for line in lines)
