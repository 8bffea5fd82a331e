"""When, from what and on what something was measured."""

import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent.parent
_PACKAGES = (
    *("lightserve", "torch", "triton", "numpy", "safetensors", "tokenizers"),
    *("uvicorn", "uvloop", "httptools", "msgspec", "pyzmq", "rpyc"),
)
_GPU_QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def describe_surroundings(command: Sequence[str]) -> dict[str, Any]:
    """Say what makes a measurement reproducible.

    Args:
        command: The script's name and its arguments.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "commit": commit_of(_ROOT) or "unknown",
        "gpu": ", ".join(dict.fromkeys(_ask(_GPU_QUERY) or ())) or "none",
        "versions": _versions(),
    }


def commit_of(root: Path) -> str | None:
    """Name a checkout's commit, and whether its files differ from it; None where there is no git or no checkout."""
    git = ("git", "-C", str(root))
    about = _ask((*git, "rev-parse", "--show-toplevel", "--short", "HEAD"))
    # A copy without a history, inside another checkout, is not at that one's commit.
    if about is None or Path(about[0]) != root.resolve():
        return None
    return about[1] + (" with changes" if _ask((*git, "status", "--porcelain", "--untracked-files=no")) else "")


def _versions() -> dict[str, str]:
    """Versions of Python, the platform and the packages that matter; CUDA's where the script has loaded torch."""
    versions = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    if "torch" in sys.modules:
        versions["cuda"] = sys.modules["torch"].version.cuda or "none"
    return versions


def _ask(command: Sequence[str]) -> list[str] | None:
    """Lines that a program answers; None when it is not there or fails.

    The driver's program tells a GPU's name without making a context, which would take memory of what is measured.
    """
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
