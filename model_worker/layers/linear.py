"""x · weightᵀ + bias, with the weight laid out once for the machine that runs it; and what stands around it."""

from typing import Protocol

import torch

from lightserve.kernels.normed import Normed
from lightserve.model_worker.tensor_parallel import Ranks


class Linear(Protocol):
    """A projection with its weight."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Map [n, in_features] to [n, out_features]."""


class NormedLinear(Protocol):
    """A projection of normalised rows, with silu(gate) · up after it if it was so made."""

    def __call__(self, normed: Normed, /) -> torch.Tensor:
        """Map [n, in_features] to [n, out_features]."""


class LinearAddNorm(Protocol):
    """A projection, summed over the ranks; its sum with the residual; the RMSNorm of that sum."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, *, out: torch.Tensor | None = None) -> Normed:
        """Project ``x`` [n, in_features], add it to ``residual`` [n, size] in place, and normalise the sum.

        Args:
            x: [n, in_features].
            residual: [n, size], changed.
            out: [n, size] contiguous; if given, the norm is complete and lies there.
        """


class AddNorm(Protocol):
    """A backend's norm of a sum."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place, and normalise the sum.

        Args:
            x: [n, size], may be changed.
            residual: [n, size], changed.
            gain: [size].
            out: [n, size] contiguous; if given, what is returned lies there.

        Returns:
            [n, size], of the weights' type.
        """


class LinearThenAddNorm:
    """Implements ``LinearAddNorm`` by one after the other.

    Args:
        linear: The projection.
        norm: Of the backend.
        gain: [size], of the norm.
        ranks: Each projects its part.
    """

    def __init__(self, linear: Linear, norm: AddNorm, gain: torch.Tensor, ranks: Ranks) -> None:
        self._linear = linear
        self._norm = norm
        self._gain = gain
        self._ranks = ranks

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, *, out: torch.Tensor | None = None) -> Normed:
        """Project, add, normalise."""
        projected = self._ranks.all_reduce(self._linear(x))
        return Normed(self._norm.add_rms_norm(projected, residual, self._gain, out=out))
