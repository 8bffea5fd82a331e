"""NVIDIA's compute-sanitizer over every kernel."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpu_checks.requirements import NotRunError

_TOUR = Path(__file__).resolve().parent / "kernel_tour.py"
_CUDA_BIN = "/usr/local/cuda/bin"
_PRINTED_ERRORS, _SHOWN_LINES = 1000, 40
_LIMIT_S = 420  # of each tool
# Every tensor is then an allocation of its own: one that is overrun shows, and one that is new holds nothing old.
_NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@dataclass(frozen=True)
class _Tool:
    """One of the sanitizer's tools; flags of the tour that go with it, and what it needs in the environment."""

    name: str
    tour_flags: tuple[str, ...]
    environment: Mapping[str, str]


_TOOLS = (
    _Tool("memcheck", (), _NO_CACHE),
    _Tool("racecheck", (), {}),
    # Rows that pad a step are computed from whatever there is, and read by nobody. What the library's bfloat16 products
    # write the tool does not see: on an H200 all of the first 1,000 reads that it reported were of one such product.
    _Tool("initcheck", ("--no_padding", "--own_products"), _NO_CACHE),
)


def sanitize() -> bool:
    """Run the tools over all kernels, all at once, since each is slow on the processor; whether none found an error.

    The kernels are compiled first, without a tool, and found in the compiler's cache after that.

    Raises:
        NotRunError: The sanitizer is not installed, or a tool cannot work on this machine and no other found an error.
    """
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:{_CUDA_BIN}")
    if sanitizer is None:
        raise NotRunError(f"compute-sanitizer is neither on PATH nor in {_CUDA_BIN}")
    for tour_flags in {tool.tour_flags for tool in _TOOLS}:
        subprocess.run([sys.executable, "-P", str(_TOUR), "--compile_only", *tour_flags], check=True)
    with ThreadPoolExecutor(len(_TOOLS)) as threads:
        runs = [threads.submit(_is_clean, sanitizer, tool) for tool in _TOOLS]
    broken = [error for run in runs if isinstance(error := run.exception(), NotRunError)]
    clean = all(run.result() for run in runs if not isinstance(run.exception(), NotRunError))
    if clean and broken:
        raise broken[0]
    return clean


def _is_clean(sanitizer: str, tool: _Tool) -> bool:
    command = [sanitizer, "--tool", tool.name, "--print-limit", str(_PRINTED_ERRORS), sys.executable, "-P", str(_TOUR)]
    start = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *tool.tour_flags],
            check=False,
            env={**os.environ, **tool.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        print(f"{tool.name}: not done after {_LIMIT_S} s", flush=True)
        return False
    num_errors = count_errors(done.stdout)
    lines = [f"{tool.name}: {num_errors} errors, exit status {done.returncode}, {time.monotonic() - start:.0f} s"]
    if num_errors or done.returncode:
        lines += [f"  {count} in {kernel}" for kernel, count in kernels_named(done.stdout).most_common()]
        lines += done.stdout.splitlines()[:_SHOWN_LINES]
    print("\n".join(lines), flush=True)  # in one piece: other tools end at the same time
    return num_errors == 0 and done.returncode == 0


def kernels_named(output: str) -> Counter[str]:
    """Count the errors that a tool has printed by the kernels in which they were found."""
    return Counter(re.findall(r"^=+ +at (.+?)\+0x", output, re.MULTILINE))


def count_errors(output: str) -> int:
    """Read how many errors and hazards a tool found.

    Raises:
        NotRunError: The tool did not work here.
    """
    if "Device not supported" in output:
        raise NotRunError("compute-sanitizer does not support this device")
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", output)
    if found is None:
        raise NotRunError(
            "compute-sanitizer ended without a summary:\n" + "\n".join(output.splitlines()[-_SHOWN_LINES:])
        )
    return int(found[1])
