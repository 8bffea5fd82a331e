"""Measure the front end by itself: HTTP processes, router and detokenizer around a model worker that computes nothing.

    bench_front_end.py [--num_streams 3000] [--tokens_per_s 16000] [--scenarios steady,crowd,limit] [--json FILE] \\
        [flags of the server, such as --httpserver_workers 4]

steady  all streams decode at once, in steps that make so many tokens a second
crowd   a third of them decode at that rate, the others wait, and whenever one ends another begins
limit   all decode at once, and a step takes no time: the process that uses a whole core is what bounds the front end

The server is real but for its worker, and so is the load generator (scripts/benchmark). Figures are of the time during
which the batch was full. Needs Linux: processor times come from /proc.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import msgspec
from benchmark.api import API_FAMILIES, Sampling
from benchmark.endpoint import Endpoint, ServerError, ServerQueries
from benchmark.fleet import ClientDiedError, FleetResult, choose_num_processes, run_fleet, schedule_requests
from benchmark.messages import Job
from benchmark.traces import RandomIds
from front_end_bench.cpu_times import CpuTimes
from front_end_bench.scenario import SCENARIOS, Scenario, make_scenario
from front_end_bench.server import running_front_end
from front_end_bench.steady_window import Delivery, NoWindowError, full_window, measure_delivery
from script_tools.flags import output_file, positive_float, positive_int
from script_tools.json_file import write_json
from script_tools.running_server import ServerDiedError
from script_tools.surroundings import describe_surroundings

_MODEL_DIR = Path(__file__).resolve().parent / "presets" / "llama-3.1-8b"
_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Result:
    """One scenario's figures.

    Attributes:
        asked_tokens_per_s: By the worker's pace; None: as fast as it can.
        delivered: To the clients.
        num_failed: Requests.
        window_s: What the figures are of.
        core_fracs: Share of a core that each process used, by name.
    """

    scenario: str
    num_streams: int
    num_running: int
    step_ms: float
    asked_tokens_per_s: float | None
    delivered: Delivery
    num_failed: int
    window_s: float
    core_fracs: dict[str, float]

    @property
    def cpu_us_per_token(self) -> dict[str, float]:
        """Processor time per token, by the kind of process: all HTTP processes together, and all clients."""
        totals: dict[str, float] = {}
        for name, core_frac in self.core_fracs.items():
            kind = name.partition("-")[0]
            totals[kind] = totals.get(kind, 0.0) + 1e6 * core_frac / self.delivered.tokens_per_s
        return totals


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped
    options, server_flags = _parse(arguments)
    try:
        results = [_run(scenario, options, server_flags) for scenario in _scenarios(options)]
    except (ServerDiedError, ServerError, ClientDiedError, NoWindowError) as error:
        print(f"bench_front_end: {error}", file=sys.stderr)
        return 2
    print(_table(results))
    if options.json is not None:
        rows = [asdict(result) | {"cpu_us_per_token": result.cpu_us_per_token} for result in results]
        write_json(options.json, {**describe_surroundings(["bench_front_end.py", *arguments]), "results": rows})
    return int(any(result.num_failed for result in results))


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--scenarios", type=_names, default=list(SCENARIOS), help="some of them, by name")
    parser.add_argument("--num_streams", type=positive_int, default=3000, help="open at once (%(default)s)")
    parser.add_argument("--tokens_per_s", type=positive_float, default=16000.0, help="the worker's pace (%(default)s)")
    parser.add_argument("--seconds", type=positive_float, default=20.0, help="of a full batch, about (%(default)s)")
    apis = sorted(name for name, family in API_FAMILIES.items() if family.takes_ids)
    parser.add_argument("--api", choices=apis, default="lightserve", help="of the clients (%(default)s)")
    parser.add_argument("--client_processes", type=positive_int, help="unset: by the streams, at most half the cores")
    parser.add_argument("--model_dir", type=Path, default=_MODEL_DIR, help="gives the vocabulary (%(default)s)")
    parser.add_argument("--json", type=output_file, help="write everything here, too")
    return parser.parse_known_args(arguments)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - SCENARIOS.keys():
        raise argparse.ArgumentTypeError(f"no scenario is called {', '.join(sorted(unknown))}")
    return names


def _scenarios(options: argparse.Namespace) -> list[Scenario]:
    return [
        make_scenario(name, options.num_streams, options.tokens_per_s, options.seconds) for name in options.scenarios
    ]


def _run(scenario: Scenario, options: argparse.Namespace, server_flags: Sequence[str]) -> Result:
    with running_front_end(scenario, ["--model_dir", str(options.model_dir), *server_flags]) as server:
        job = _job(scenario, server.url, options.api)
        num_processes = options.client_processes or choose_num_processes(len(job.requests), None)
        with CpuTimes(server.pid) as cpu_times:
            load = run_fleet(job, num_processes, lambda progress: None)
    result = _measure(scenario, load, cpu_times)
    print(_processes_text(result), flush=True)
    return result


def _job(scenario: Scenario, url: str, api: str) -> Job:
    with ServerQueries(Endpoint.parse(url), None) as queries:
        info = queries.get("/get_server_info")
        model = queries.get("/v1/models")["data"][0]["id"]
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    prompts = RandomIds(info["vocab_size"], seed=0).prompts(scenario.lengths)
    bodies = [msgspec.json.encode(API_FAMILIES[api].write_body(prompt, sampling, model)) for prompt in prompts]
    return Job(url, api, None, None, _TIMEOUT_S, schedule_requests(bodies, [0.0] * len(bodies)))


def _measure(scenario: Scenario, load: FleetResult, cpu_times: CpuTimes) -> Result:
    window = full_window(load.outcomes, scenario.num_full)
    return Result(
        scenario=scenario.name,
        num_streams=len(scenario.lengths),
        num_running=scenario.num_running,
        step_ms=1000 * scenario.step_s,
        asked_tokens_per_s=scenario.asked_tokens_per_s,
        delivered=measure_delivery(load.outcomes, window),
        num_failed=sum(outcome.failure is not None for outcome in load.outcomes),
        window_s=window.duration_s,
        core_fracs=cpu_times.core_fracs(window.start_s, window.end_s),
    )


def _processes_text(result: Result) -> str:
    each_us = ", ".join(f"{name} {us:.1f}" for name, us in result.cpu_us_per_token.items())
    lines = [f"{name:<18}{frac:7.1%} of a core" for name, frac in result.core_fracs.items()]
    return "\n".join([f"{result.scenario}: us of processor time per token: {each_us}", *lines])


def _table(results: Sequence[Result]) -> str:
    names = ("running", "step ms", "asked tok/s", "got tok/s", "got/asked", "tok/read", "ITL p50", "ITL p99", "gap p99")
    lines = [_line("scenario", *names, "failed", "busiest process")]
    for result in results:
        asked, delivered = result.asked_tokens_per_s, result.delivered
        busiest = max(result.core_fracs, key=result.core_fracs.__getitem__)
        lines.append(
            _line(
                result.scenario,
                f"{result.num_running}",
                f"{result.step_ms:.1f}",
                f"{asked:.0f}" if asked else "-",
                f"{delivered.tokens_per_s:.0f}",
                f"{delivered.tokens_per_s / asked:.1%}" if asked else "-",
                f"{delivered.tokens_per_read:.2f}",
                *(f"{value:.1f}" for value in (delivered.itl_ms.p50, delivered.itl_ms.p99, delivered.gap_ms.p99)),
                f"{result.num_failed}",
                f"{busiest}, {result.core_fracs[busiest]:.0%}",
            )
        )
    return "\n".join(lines)


def _line(first: str, *cells: str) -> str:
    *middle, last = cells
    return f"{first:<9}" + "".join(f"{cell:>12}" for cell in middle) + f"  {last}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
