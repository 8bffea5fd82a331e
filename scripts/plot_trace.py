"""Draw a few decode steps of a trace that bench_engine.py --profile_batches has written, and where the GPU idles.

    plot_trace.py decode-256.json --steps 3 --title "8B, batch 256" --out docs/images/decode_8b_256.png

A step ends with the kernel that hands on its ids (--last_kernel). The steps drawn are from the middle of the last run
of steps without prompts; the idle share of all of that run is in the title beside that of the picture. Below them, the
time about the end of one of them. A kernel that was launched before its predecessor ended counts as running.
"""

import argparse
import re
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from script_tools.flags import input_file, lacking, output_picture, positive_int

from lightserve.model_worker.profiling import GpuEvent, read_gpu_events, summarize

# The first pattern that a name matches gives its kind. Colours keep apart for people who see red and green alike.
_KINDS = (
    ("copies", "#999999", r"[Mm]emcpy|[Mm]emset|_copy_words_"),
    ("attention", "#0072b2", r"attention|_plan_(decode|prefill)_|_gather_(slots|kv)_|_merge_kernel"),
    ("products", "#e69f00", r"gemm|gemv|nvjet|cutlass|cublas|splitK"),
    ("sampling", "#cc79a7", r"_greedy_|_sample_|_penalties_|_forbid_|_commit_tokens_"),
    ("norms, rotary embedding, others", "#009e73", r""),
)
_IDLE_COLOUR = "#d00000"
_CLOSE_US = 250.0  # either side of a step's end
_SHOWN_GAP_US = 1.0  # shorter ones are what the clock of a trace can tell apart


@dataclass(frozen=True)
class Steps:
    """Consecutive decode steps.

    Attributes:
        ends: In µs: the end of the step before the first, then of each step.
        events: All that the GPU did between the first and the last of them.
    """

    ends: Sequence[float]
    events: Sequence[GpuEvent]

    @property
    def idle_frac(self) -> float:
        """Share of the time in which nothing ran."""
        busy_us = summarize(self.events).busy_ms * 1000
        return 1 - busy_us / (self.ends[-1] - self.ends[0])

    def middle(self, count: int) -> "Steps":
        """Take some steps from the middle."""
        first = max(0, (len(self.ends) - 1 - count) // 2)
        return between(self.events, self.ends[first : first + count + 1])

    def gaps(self) -> list[tuple[float, float]]:
        """Start and end of each time in which nothing ran, in µs."""
        gaps, done_until = [], self.ends[0]
        for start, end, _ in [*self.events, (self.ends[-1], self.ends[-1], "")]:
            if start > done_until:
                gaps.append((done_until, start))
            done_until = max(done_until, end)
        return gaps


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    decode = options.decode
    shown = decode.middle(options.steps)
    num_steps = len(decode.ends) - 1
    step_ms = (decode.ends[-1] - decode.ends[0]) / num_steps / 1000
    title = (
        f"{options.title}: {len(shown.ends) - 1} of {num_steps} decode steps of {step_ms:.2f} ms; the GPU idles "
        f"{shown.idle_frac:.2%} of the time shown, {decode.idle_frac:.2%} of all"
    )
    print(title)
    _draw(shown, title, options.out)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=input_file, help="a Chrome trace")
    parser.add_argument("--steps", type=positive_int, default=3, help="how many to draw (%(default)s)")
    parser.add_argument("--title", default="Decode", help="what was traced")
    parser.add_argument(
        "--last_kernel", type=_pattern, default="commit_tokens", help="pattern of the last kernel of a step"
    )
    parser.add_argument(
        "--prompts", type=_pattern, default="prefill", help="pattern of kernels that only steps with prompts have"
    )
    parser.add_argument("--out", type=output_picture, required=True, help="the picture")
    options = parser.parse_args(arguments)
    if problem := lacking("matplotlib"):
        parser.error(problem)
    try:
        options.decode = decode_steps(read_gpu_events(options.trace), options.last_kernel, options.prompts)
    except ValueError as error:
        parser.error(f"{options.trace}: {error}")
    return options


def _pattern(text: str) -> "re.Pattern[str]":
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no pattern: {error}") from error


def decode_steps(events: Sequence[GpuEvent], last_kernel: "re.Pattern[str]", prompts: "re.Pattern[str]") -> Steps:
    """Find the last run of steps without prompts.

    Args:
        events: In order of start.
        last_kernel: Of the kernel that ends a step.
        prompts: Of kernels that only steps with prompts have.

    Raises:
        ValueError: There is not one such step.
    """
    last_prompt = max((end for _, end, name in events if prompts.search(name)), default=float("-inf"))
    ends = [end for _, end, name in events if last_kernel.search(name) and end > last_prompt]
    if len(ends) < 2:
        raise ValueError(f"no decode step: {len(ends)} kernels match {last_kernel.pattern!r} after the last prompt")
    return between(events, ends)


def between(events: Sequence[GpuEvent], ends: Sequence[float]) -> Steps:
    """Keep what lies between the first and the last end, cut to it."""
    begin, finish = ends[0], ends[-1]
    first = bisect_left(events, (begin, 0.0, ""))
    kept = [(max(start, begin), min(end, finish), name) for start, end, name in events[max(0, first - 8) :]]
    return Steps(ends, [event for event in kept if event[0] < event[1]])


def kind_of(name: str) -> str:
    """Tell a kernel's kind."""
    return next(kind for kind, _, pattern in _KINDS if re.search(pattern, name))


def _draw(steps: Steps, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (whole, close) = pyplot.subplots(2, figsize=(14, 6.4), layout="constrained")
    _draw_lanes(whole, steps, steps.ends[0], steps.ends[-1])
    whole.set_title(title, fontsize=10)
    end = steps.ends[len(steps.ends) // 2]
    _draw_lanes(close, steps, end - _CLOSE_US, end + _CLOSE_US)
    close.set_title("From one step to the next", fontsize=10)
    _save(figure, path)


def _draw_lanes(axes: Any, steps: Steps, start: float, end: float) -> None:
    """Draw a lane for each kind of kernel, and one for idle time, from ``start`` to ``end`` in µs."""
    gaps = [gap for gap in steps.gaps() if gap[1] - gap[0] >= _SHOWN_GAP_US]
    lanes = [(f"idle (from {_SHOWN_GAP_US:.0f} µs)", _IDLE_COLOUR, gaps)]
    for kind, colour, _ in _KINDS:
        lanes.append((kind, colour, [(a, b) for a, b, name in steps.events if kind_of(name) == kind]))
    for row, (_, colour, intervals) in enumerate(lanes):
        bars = [((a - start) / 1000, (b - a) / 1000) for a, b in intervals if b > start and a < end]
        # What is thinner than a pixel keeps its edge.
        axes.broken_barh(bars, (row + 0.1, 0.8), facecolors=colour, edgecolors=colour, linewidth=0.3)
    for step_end in steps.ends:
        axes.axvline((step_end - start) / 1000, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks([row + 0.5 for row in range(len(lanes))], [name for name, _, _ in lanes])
    axes.set(xlim=(0, (end - start) / 1000), ylim=(0, len(lanes)), xlabel="ms")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
