"""Figures of a whole server: how soon it is ready, and what the load generator sees."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from script_tools.load_generator import send_load
from script_tools.running_server import Server, running_server

from engine_bench.result_table import Figure, Measured

StartServer: TypeAlias = Callable[[Sequence[str], Mapping[str, str]], AbstractContextManager[Server]]

FIRST_START = "start to ready, nothing compiled before"
LATER_START = "start to ready, compiled before"


class FailedRequestsError(Exception):
    """Some requests of a load failed: its figures are not those of the whole load."""


class MissingFigureError(Exception):
    """A report has no number where a figure should stand."""


@dataclass(frozen=True)
class Load:
    """One way to load the server.

    Attributes:
        flags: Of the load generator.
        figures: Where in the results of its report each figure stands, by the figure's name.
    """

    flags: Sequence[str]
    figures: Mapping[str, Sequence[str]]


def measure_server(
    flags: Sequence[str], loads: Sequence[Load], repeats: int, *, start: StartServer = running_server
) -> Iterator[Measured]:
    """Start a server that finds no compiled kernel, then one that finds those of the first, and load the second.

    Args:
        flags: Of the server.
        loads: One after the other, each with all its repeats.
        repeats: Of each load.
        start: Starts a server with these flags and this environment, and ends it.

    Raises:
        ServerDiedError: A server did not become ready.
        FailedRequestsError: A request failed.
        MissingFigureError: All loads were made, and some of their figures are not in the reports.
        subprocess.CalledProcessError: A load could not be made.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = {"TRITON_CACHE_DIR": cache}
        with start(flags, environment) as server:
            yield Measured([Figure(FIRST_START, [server.start_s])], server.start_s)
        with start(flags, environment) as server:
            yield Measured([Figure(LATER_START, [server.start_s])], server.start_s)
            yield from measure_loads(server.url, loads, repeats)


def measure_loads(url: str, loads: Sequence[Load], repeats: int) -> Iterator[Measured]:
    """Load a server that is ready; see ``measure_server``."""
    missing = []
    for index, load in enumerate(loads):
        # No two runs share a seed: prompts of one seed begin with the same ids, whatever their lengths, and the prefix
        # cache would know them.
        reports = [_send(url, load, seed=repeat * len(loads) + index) for repeat in range(repeats)]
        values = {what: [_look_up(report, path) for report in reports] for what, path in load.figures.items()}
        figures = [Figure(what, [v for v in found if v is not None]) for what, found in values.items()]
        missing += [figure.what for figure in figures if len(figure.values) < repeats]
        yield Measured([figure for figure in figures if figure.what not in missing], reports)
    if missing:
        raise MissingFigureError(f"not in the reports: {'; '.join(missing)}")


def _send(url: str, load: Load, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = send_load(url, [*load.flags, "--seed", str(seed)], Path(folder) / "report.json")
    if failures := report["results"]["failures"]:
        raise FailedRequestsError(f"{report['command']}: {failures}, {report['results']['failure_details']}")
    return report


def _look_up(report: dict[str, Any], path: Sequence[str]) -> float | None:
    """Find a figure; None where the report says ``null``, as of the time per token when every answer has one."""
    value = report["results"]
    for name in path:
        if value is None:
            return None
        value = value[name]
    return None if value is None else float(value)
