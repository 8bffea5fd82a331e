"""What the user reads: a table; what programs read: one JSON object."""

import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from benchmark.metrics import Distribution, Summary

# A client that is short of time reads late, and then it is itself that it measures.
_BUSY_CLIENT_FRAC = 0.8
_OUR_PACKAGES = ("lightserve", "httptools", "msgspec", "numpy", "uvloop")


@dataclass(frozen=True)
class Report:
    """A run and its surroundings.

    Attributes:
        title: One line: what was sent where.
        cpu_fracs: Share of a core that each client process used.
        warnings: What the user should know before trusting the figures.
    """

    title: str
    summary: Summary
    cpu_fracs: list[float]
    skipped: dict[str, int]
    warnings: list[str]

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
        lines = [self.title, *(f"{name:<20}{value}" for name, value in rows), "", *_latency_lines(summary)]
        lines += [f"  first {kind}: {detail}" for kind, detail in summary.failure_details.items()]
        return "\n".join(lines + [f"warning: {warning}" for warning in self._all_warnings()])

    def json(self, arguments: Sequence[str], settings: dict[str, Any], server: dict[str, Any]) -> bytes:
        """Write everything as one JSON object.

        Args:
            arguments: The command line; a key in it is blotted out.
            settings: The options as they were understood.
            server: What the server says of itself.
        """
        everything = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": _command_line(arguments),
            "versions": versions(),
            "settings": settings | {"api_key": None, "request_rate": str(settings["request_rate"])},  # JSON has no inf
            "server": server,
            "results": asdict(self.summary),
            "client_cpu_fracs": self.cpu_fracs,
            "skipped": self.skipped,
            "warnings": self._all_warnings(),
        }
        return msgspec.json.format(msgspec.json.encode(everything, enc_hook=str), indent=2)

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


def _command_line(arguments: Sequence[str]) -> str:
    shown = list(arguments)
    for i, argument in enumerate(shown):
        name, equals, _ = argument.partition("=")
        if name.replace("-", "_") == "__api_key":
            if equals:
                shown[i] = f"{name}=***"
            elif i + 1 < len(shown):
                shown[i + 1] = "***"
    return shlex.join(shown)


def versions(packages: Sequence[str] = _OUR_PACKAGES) -> dict[str, str]:
    """Versions of Python, the platform and the packages that matter."""
    versions = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions
