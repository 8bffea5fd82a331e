"""Load a server with streamed requests over HTTP and measure what comes back.

Works with lightserve and with any server of OpenAI's API. Prompts come from a file of ShareGPT conversations, from a
length trace, or are random ids of one length. Where stderr is no terminal, a line every 5 s says where the run stands.
Ctrl-C and SIGTERM end it with a report of the requests that have ended.

Exit status: 0; 1 when too many requests failed; 2 when the run could not be made; 130 or 143 when it was interrupted.
"""

import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from benchmark.api import API_FAMILIES
from benchmark.endpoint import Endpoint, ServerError, ServerQueries
from benchmark.fleet import ClientDiedError, FleetResult, choose_num_processes, run_fleet, schedule_requests
from benchmark.messages import Job
from benchmark.metrics import summarize
from benchmark.options import Options, parse_options
from benchmark.progress import ProgressLines
from benchmark.report import Report
from benchmark.workload import Workload, WorkloadError, make_workload, write_bodies
from script_tools.json_file import write_json

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_INTERRUPTED = 128  # plus the signal's number


def main(arguments: list[str]) -> int:
    """Run the benchmark; return the exit status."""
    options = parse_options(arguments)
    try:
        return _run(options, arguments)
    except (WorkloadError, ServerError, ClientDiedError, OSError, ValueError) as error:
        print(f"benchmark_sharegpt: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmark_sharegpt: interrupted", file=sys.stderr)
        return _INTERRUPTED + signal.SIGINT


def _run(options: Options, arguments: list[str]) -> int:
    with ServerQueries(Endpoint.parse(options.base_url), options.api_key) as queries:
        model = _model_name(options, queries)
        workload = make_workload(options, queries, model)
        server = _server_info(queries)
    result = _send(options, workload, model)
    interruption = _interruption(result, workload)
    if not result.outcomes:
        print(f"benchmark_sharegpt: nothing to report: {interruption}", file=sys.stderr)
        return _exit_status(result, 0.0, options)
    summary = summarize(result.outcomes, workload.prompts, options.limits)
    report = Report(
        _title(options, workload), summary, result.cpu_fracs, dict(workload.skipped), workload.warnings, interruption
    )
    print(report.table())
    if options.json is not None:
        command = ["benchmark_sharegpt.py", *arguments]
        write_json(options.json, report.everything(command, asdict(options), server))
    return _exit_status(result, summary.num_failed / summary.num_requests, options)


def _model_name(options: Options, queries: ServerQueries) -> str:
    if options.model is not None:
        return options.model
    if not API_FAMILIES[options.api].needs_model:
        return ""
    try:
        return str(queries.get("/v1/models")["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError("/v1/models lists no model: give --model") from error


def _server_info(queries: ServerQueries) -> dict[str, Any]:
    for path in ("/get_server_info", "/version"):
        try:
            info = queries.get(path)
        except ServerError:
            continue  # other servers have no such route
        if isinstance(info, dict):
            return info
    return {}


def _send(options: Options, workload: Workload, model: str) -> FleetResult:
    bodies = write_bodies(workload.prompts, options, model)
    num_processes = options.client_processes or choose_num_processes(len(bodies), options.max_concurrency)
    if workload.warmups:
        warmups = write_bodies(workload.warmups, options, model)
        warming = ProgressLines(sys.stderr, "warming up")
        result = run_fleet(_job(options, warmups, [0.0] * len(warmups)), 1, warming.show, _STOP_SIGNALS)
        if result.stopped_by is not None:
            return FleetResult([], [], result.stopped_by)
    progress = ProgressLines(sys.stderr, f"{len(bodies)} requests")
    return run_fleet(_job(options, bodies, workload.offsets_s), num_processes, progress.show, _STOP_SIGNALS)


def _job(options: Options, bodies: list[bytes], offsets_s: list[float]) -> Job:
    return Job(
        base_url=options.base_url,
        api=options.api,
        api_key=options.api_key,
        max_concurrency=options.max_concurrency,
        timeout_s=options.timeout_s,
        requests=schedule_requests(bodies, offsets_s),
    )


def _title(options: Options, workload: Workload) -> str:
    source = options.dataset.name if options.dataset is not None else "random ids"
    return f"{len(workload.prompts)} requests of {source} to {options.base_url} ({options.api})"


def _interruption(result: FleetResult, workload: Workload) -> str | None:
    if result.stopped_by is None:
        return None
    return f"{result.stopped_by.name} came when {len(result.outcomes)} of {len(workload.prompts)} requests had ended"


def _exit_status(result: FleetResult, failed_frac: float, options: Options) -> int:
    if result.stopped_by is not None:
        return _INTERRUPTED + result.stopped_by
    return int(failed_frac > options.max_failed_frac)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
