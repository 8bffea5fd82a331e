"""A run as a picture."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from router_simulation.timeline import Timeline


def draw_plot(timeline: Timeline, pool: int, path: Path) -> None:
    """Draw slots in use against the limit ``pool``, and running and waiting requests, over time."""

    step = max(1, len(timeline.times_s) // 4000)
    times_s = timeline.times_s[::step]
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(9, 6))
    upper.plot(times_s, timeline.slots[::step], linewidth=0.8, label="slots in use")
    upper.axhline(pool, color="black", linestyle="--", linewidth=0.8, label="max_total_token_num")
    upper.set_ylim(0, pool * 1.05)
    lower.plot(times_s, timeline.running[::step], linewidth=0.8, label="running requests")
    lower.plot(times_s, timeline.waiting[::step], linewidth=0.8, label="waiting requests")
    lower.set_yscale("symlog")
    lower.set_xlabel("seconds")
    for axes in (upper, lower):
        axes.legend(loc="lower right")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
