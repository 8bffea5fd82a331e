"""Check on a machine with a GPU all that a machine without one cannot.

    gpu_check.py [--gguf FILE] [--only NAME,NAME]

kernels     every kernel against its reference
engine      the engine on tiny models against the CPU's, with and without CUDA graphs
model       greedy ids of the default model in float32: CPU, GPU, GPU without graphs
pressure    many requests of mixed lengths, some of whose clients leave, through a pool that is always full: each gets
            the ids that it gets alone
memory      an 8B's shape: too large a pool is refused; the largest steps there can be, with penalties and draws; every
            slot of the pool that the engine chose for itself in use at once. Memory stays what it was
server      a whole server under load: no request fails
sanitizer   compute-sanitizer over every kernel: memcheck, racecheck, initcheck
ranks       tensor parallel over two GPUs: the greedy ids of one GPU
saturation  an 8B's shape, a whole server with more requests than fit, for --minutes: memory stays what it is, no
            request fails; only when it is named with --only, and with --trace

A check that cannot run on a machine is listed as not run. Exit status: 0 if all that were asked for passed, 1 if one
failed, 2 if none failed but one was not run.
"""

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from gpu_checks.default_model_check import compare_devices
from gpu_checks.memory_check import fill_memory
from gpu_checks.pressure_check import press
from gpu_checks.ranks_check import compare_ranks
from gpu_checks.requirements import NotRunError, require_gpus
from gpu_checks.sanitizer_check import sanitize
from gpu_checks.saturation_check import saturate
from gpu_checks.server_check import run_server
from script_tools.flags import input_file, positive_float, positive_int

from lightserve.config import ServerConfig
from lightserve.default_model import fetch_default_model

_ROOT = Path(__file__).resolve().parent.parent
_PRESET = _ROOT / "scripts" / "presets" / "llama-3.1-8b"
_ONLY_WHEN_NAMED = ("saturation",)


class Outcome(Enum):
    """What became of a check."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOT_RUN = "NOT RUN"


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    checks = _checks(options)
    names = options.only or [name for name in checks if name not in _ONLY_WHEN_NAMED]
    return summarize({name: report(name, checks[name]) for name in names})


def _checks(options: argparse.Namespace) -> dict[str, Callable[[], bool]]:
    def gguf() -> Path:
        given: Path | None = options.gguf
        return given or fetch_default_model()

    return {
        "kernels": lambda: _run_tests("tests/kernels"),
        "engine": lambda: _run_tests("tests/model_worker/cuda/test_engine.py"),
        "model": lambda: compare_devices(gguf()),
        "pressure": lambda: press(_crowded(gguf(), options.num_requests), options.num_requests),
        "memory": lambda: fill_memory(_PRESET),
        "server": lambda: run_server(gguf()),
        "sanitizer": sanitize,
        "ranks": compare_ranks,
        "saturation": lambda: saturate(_PRESET, options.trace, options.minutes, options.folder),
    }


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=input_file, help="unset: the default model, fetched once")
    parser.add_argument("--only", type=lambda text: text.split(","), help="some of the checks, by name")
    parser.add_argument("--num_requests", type=positive_int, default=2000, help="of the pressure check")
    parser.add_argument("--minutes", type=positive_float, default=10.0, help="of the saturation check")
    parser.add_argument("--trace", type=input_file, help="of the saturation check: lengths of its requests (CSV)")
    parser.add_argument("--folder", type=Path, help="of the saturation check: where it leaves its figures")
    options = parser.parse_args(arguments)
    unknown = set(options.only or ()) - set(_checks(options))
    if unknown:
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    if "saturation" in (options.only or ()) and options.trace is None:
        parser.error("saturation needs --trace")
    return options


def report(name: str, check: Callable[[], bool]) -> Outcome:
    """Run a check and say what became of it; one that breaks has failed, and the others still run."""
    start = time.monotonic()
    try:
        require_gpus(1)
        outcome = Outcome.PASSED if check() else Outcome.FAILED
    except NotRunError as error:
        print(error)
        outcome = Outcome.NOT_RUN
    except Exception:
        traceback.print_exc()
        outcome = Outcome.FAILED
    print(f"== {name}: {outcome.value} in {time.monotonic() - start:.0f} s", flush=True)
    return outcome


def summarize(outcomes: dict[str, Outcome]) -> int:
    """Say which checks failed and which were not run; return the exit status."""
    failed, not_run = (
        [name for name, outcome in outcomes.items() if outcome is kind] for kind in (Outcome.FAILED, Outcome.NOT_RUN)
    )
    if failed:
        print("failed: " + ", ".join(failed))
    if not_run:
        print("NOT RUN: " + ", ".join(not_run))
    if not failed and not not_run:
        print("passed: " + ", ".join(outcomes))
    return 1 if failed else 2 if not_run else 0


def _run_tests(path: str) -> bool:
    # Without the project's settings: a GPU machine need not have every plugin that they name.
    options = ["-c", "/dev/null", f"--rootdir={_ROOT}", "--import-mode=importlib", "-p", "no:cacheprovider", "-q"]
    command = [sys.executable, "-P", "-m", "pytest", *options, str(_ROOT / path)]
    return subprocess.run(command, check=False).returncode == 0


def _crowded(gguf: Path, num_requests: int) -> ServerConfig:
    """A pool that holds a few dozen requests, none of which shares anything."""
    return ServerConfig(
        model_dir=str(gguf),
        dtype="float32",
        max_total_token_num=6000,
        running_max_req_size=64,
        chunked_prefill_size=512,
        max_queued_reqs=num_requests,
        disable_prefix_cache=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
