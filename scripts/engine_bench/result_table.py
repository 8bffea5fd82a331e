"""Figures beside what they are compared with, as rows of a Markdown table."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

TABLE_HEAD = "| what | floor | goal | median | smallest | largest | goal met |\n|---|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Figure:
    """What was measured, by its name, once or repeatedly."""

    what: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        """Of the repeats."""
        return median(self.values)


@dataclass(frozen=True)
class Measured:
    """Figures that became known together, and all else that was reported with them."""

    figures: Sequence[Figure]
    report: Any


@dataclass(frozen=True)
class Target:
    """What a figure is compared with.

    Attributes:
        unit: Rates, in something per second, should be high; everything else should be low.
        floor: What the machine's memory and matrix rates alone would allow; None: not known.
        goal: What we want; None: nothing in particular.
    """

    unit: str
    floor: float | None = None
    goal: float | None = None

    def is_met(self, value: float) -> bool | None:
        """Whether a value reaches the goal; None when there is none."""
        if self.goal is None:
            return None
        return value >= self.goal if self.unit.endswith("/s") else value <= self.goal


def table_row(figure: Figure, target: Target) -> str:
    """Write one row; the range of what was measured once stays empty."""
    once = len(figure.values) == 1
    smallest, largest = ("", "") if once else (_measured(min(figure.values)), _measured(max(figure.values)))
    met = {True: "yes", False: "no", None: ""}[target.is_met(figure.median)]
    cells = (_given(target.floor), _given(target.goal), _measured(figure.median), smallest, largest, met)
    return f"| {figure.what}, {target.unit} | " + " | ".join(cells) + " |"


def _given(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _measured(value: float) -> str:
    """Write four digits, so that a value does not look like the goal that it just misses."""
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"
