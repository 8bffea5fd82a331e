"""What the user reads: a table; what programs read: one JSON object."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from script_tools.surroundings import describe_surroundings

from benchmark.metrics import Distribution, Summary

# A client that is short of time reads late, and then it is itself that it measures.
_BUSY_CLIENT_FRAC = 0.8


@dataclass(frozen=True)
class Report:
    """A run and its surroundings.

    Attributes:
        title: One line: what was sent where.
        cpu_fracs: Share of a core that each client process used.
        warnings: What the user should know before trusting the figures.
        interruption: Why the figures are not those of the whole load; None: they are.
    """

    title: str
    summary: Summary
    cpu_fracs: list[float]
    skipped: dict[str, int]
    warnings: list[str]
    interruption: str | None = None

    def table(self) -> str:
        """Write the table."""
        summary = self.summary
        rows = [
            ("requests done", f"{summary.num_done}"),
            ("requests failed", _failures(summary)),
            ("duration", f"{summary.duration_s:.2f} s"),
            ("prompt tokens", f"{summary.prompt_tokens}"),
            ("output tokens", f"{summary.output_tokens} (counted by {_count_sources(summary)})"),
            ("request throughput", f"{summary.request_throughput:.2f} req/s"),
            ("output throughput", f"{summary.output_throughput:.1f} tok/s"),
            ("total throughput", f"{summary.total_throughput:.1f} tok/s"),
        ]
        if summary.goodput is not None:
            rows.append(("goodput", f"{summary.goodput:.2f} req/s"))
        cpu = ", ".join(f"{frac:.0%}" for frac in self.cpu_fracs)
        rows.append(("client processes", f"{len(self.cpu_fracs)}, using {cpu} of a core"))
        title = self.title if self.interruption is None else f"{self.title}\nINCOMPLETE: {self.interruption}"
        lines = [title, *(f"{name:<20}{value}" for name, value in rows), "", *_latency_lines(summary)]
        lines += [f"  first {kind}: {detail}" for kind, detail in summary.failure_details.items()]
        return "\n".join(lines + [f"warning: {warning}" for warning in self._all_warnings()])

    def everything(self, command: Sequence[str], settings: dict[str, Any], server: dict[str, Any]) -> dict[str, Any]:
        """Gather all that there is to know of the run.

        Args:
            command: The script's name and its arguments; a key among them is blotted out.
            settings: The options as they were understood.
            server: What the server says of itself.
        """
        return {
            **describe_surroundings(_without_key(command)),
            "settings": settings | {"api_key": None, "request_rate": str(settings["request_rate"])},  # JSON has no inf
            "server": server,
            "results": asdict(self.summary),
            "client_cpu_fracs": self.cpu_fracs,
            "skipped": self.skipped,
            "interruption": self.interruption,
            "warnings": self._all_warnings(),
        }

    def _all_warnings(self) -> list[str]:
        warnings = list(self.warnings)
        summary = self.summary
        if by_events := summary.output_tokens_by.get("events"):
            warnings.append(f"{by_events} answers came without usage: their tokens are counted as one per event")
        if summary.short_answers:
            warnings.append(f"{summary.short_answers} answers are shorter than asked for")
        if summary.answers_without_text:
            warnings.append(f"{summary.answers_without_text} answers have tokens but no text")
        if max(self.cpu_fracs, default=0.0) > _BUSY_CLIENT_FRAC:
            warnings.append("a client process was busy: use more --client_processes")
        return warnings


def _failures(summary: Summary) -> str:
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(summary.failures.items()))
    return f"{summary.num_failed}" + (f" ({kinds})" if kinds else "")


def _count_sources(summary: Summary) -> str:
    sources = sorted(summary.output_tokens_by)
    if len(sources) == 1:
        return sources[0]
    return ", ".join(f"{name} in {summary.output_tokens_by[name]}" for name in sources) or "nothing"


def _latency_lines(summary: Summary) -> list[str]:
    lines = [f"{'latency, ms':<20}{'mean':>12}{'p50':>12}{'p90':>12}{'p99':>12}"]
    for name, values in (
        ("time to first token", summary.ttft_ms),
        ("time per token", summary.tpot_ms),
        ("inter-token", summary.itl_ms),
        ("end to end", summary.e2e_ms),
    ):
        lines.append(f"{name:<20}" + _cells(values))
    return lines


def _cells(values: Distribution | None) -> str:
    if values is None:
        return f"{'-':>12}" * 4
    return "".join(f"{value:>12.2f}" for value in (values.mean, values.p50, values.p90, values.p99))


def _without_key(command: Sequence[str]) -> list[str]:
    shown = list(command)
    for i, argument in enumerate(shown):
        name, equals, _ = argument.partition("=")
        if name.replace("-", "_") == "__api_key":
            if equals:
                shown[i] = f"{name}=***"
            elif i + 1 < len(shown):
                shown[i + 1] = "***"
    return shown
