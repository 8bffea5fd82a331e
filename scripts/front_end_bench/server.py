"""A whole server around a modelled worker, as long as a block lasts."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
from script_tools.running_server import Server, running_server

from front_end_bench.scenario import FILLING_STEP_S, Scenario
from front_end_bench.worker_process import WorkerPace

_SCRIPTS = Path(__file__).resolve().parent.parent


def running_front_end(scenario: Scenario, flags: Sequence[str]) -> AbstractContextManager[Server]:
    """Start a server for a scenario, as ``running_server`` does; it ends with this process, too."""
    pace = WorkerPace(scenario.step_s, scenario.num_full, FILLING_STEP_S)
    return running_server(
        [*_flags(scenario), *flags],
        {"PYTHONPATH": os.pathsep.join(filter(None, [str(_SCRIPTS), os.environ.get("PYTHONPATH")]))},
        ["-m", "front_end_bench.serve_modelled_worker", msgspec.json.encode(pace).decode(), "serve"],
    )


def _flags(scenario: Scenario) -> list[str]:
    settings = {
        "device": "cpu",  # so that no GPU is looked for
        "load_format": "dummy",
        "log_level": "warning",
        "drain_timeout_s": 0,
        "max_total_token_num": scenario.max_total_token_num,
        "running_max_req_size": scenario.num_running,
        "max_queued_reqs": len(scenario.lengths),
        "chunked_prefill_size": 8192,
    }
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]
