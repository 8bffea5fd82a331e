"""The load generator as a command: what a script sends to a server that it has started."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

_COMPLETE = (0, 1)  # statuses of a run that was made; 1 where too many requests failed
_SCRIPT = Path(__file__).resolve().parent.parent / "benchmark_sharegpt.py"


def load_command(url: str, flags: Sequence[str]) -> list[str]:
    """Write the command that loads a server."""
    return [sys.executable, "-P", str(_SCRIPT), "--base_url", url, *flags]


def send_load(url: str, flags: Sequence[str], report: Path) -> dict[str, Any]:
    """Run the load generator; failed requests are in its report like the others.

    Args:
        url: The server's.
        flags: Of the load.
        report: The file that it writes.

    Returns:
        What it wrote there.

    Raises:
        subprocess.CalledProcessError: The run could not be made, or was interrupted.
    """
    report.unlink(missing_ok=True)
    command = load_command(url, [*flags, "--json", str(report)])
    status = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
    if status not in _COMPLETE or not report.exists():
        raise subprocess.CalledProcessError(status, command)
    return msgspec.json.decode(report.read_bytes(), type=dict[str, Any])
