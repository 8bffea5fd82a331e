"""One thing that is checked and timed, and what cases share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan

import torch

BF16 = torch.bfloat16
VOCAB_SIZE = 128_256
TOLERANCE = 1e-2  # of a case's error
_CACHE_BYTES = 64 << 20  # more than the second-level cache of an H200


@dataclass
class Case:
    """One thing to check and to time.

    Attributes:
        name: Its sizes.
        runs: The same work on different memory.
        error: Compares the first run with the reference: ‖out - ref‖ / ‖ref‖ of numbers, how many differ of ids, the
            share of draws that fell on another side of a border. NaN where the kernel left something unwritten.
        bytes: Moved by one run.
        flops: Done by one run; given where they, not bytes, are the limit.
        rival: The same work by the vendor's library.
    """

    name: str
    runs: Sequence[Callable[[], object]]
    error: Callable[[], float]
    bytes: float = 0
    flops: float = 0
    rival: Sequence[Callable[[], object]] = ()


def copies(bytes_per_run: float, most: int = 16) -> range:
    """Give enough sets of inputs for a run to find nothing of its last one in the cache."""
    return range(max(2, min(most, int(3 * _CACHE_BYTES / bytes_per_run) + 1)))


def error_against(
    kernel: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], *arguments: torch.Tensor
) -> float:
    return relative_error(kernel(*arguments), reference(*arguments))


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())


def num_different(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out != reference).sum())


def worst(*errors: float) -> float:
    """Give the largest error; NaN is worse than any, though ``max`` may pass it over."""
    return max(errors, key=lambda error: (isnan(error), error))
