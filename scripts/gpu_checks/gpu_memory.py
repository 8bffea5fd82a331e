"""Memory in use on the GPUs, asked of the driver without making a context, which would take memory itself."""

import subprocess

_QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


def used_mib() -> int:
    """MiB in use on all GPUs together, by every process and by the driver.

    Raises:
        subprocess.CalledProcessError: The driver does not answer.
    """
    lines = subprocess.run(_QUERY, check=True, capture_output=True, text=True).stdout.split()
    return sum(int(line) for line in lines)
