"""x · weightᵀ + bias, with the weight laid out once for the machine that runs it; and what stands around it."""

from typing import Protocol

import torch


class Linear(Protocol):
    """A projection with its weight."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Map [n, in_features] to [n, out_features]."""


class NormLinear(Protocol):
    """Residual sum, RMSNorm and projection in one, with silu(gate) · up after it if it was so made."""

    def __call__(self, x: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``x`` (if any) to the residual, normalise the sum, and project it.

        Args:
            x: [n, in_features], may be changed.
            residual: [n, in_features], may be changed.

        Returns:
            [n, out_features], and the new residual.
        """


class Norms(Protocol):
    """The two norms of a backend."""

    def rms_norm(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """Normalise ``x`` [n, size] by rows, with ``gain`` [size]; gives [n, size]."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """Add ``x`` [n, size] to ``residual`` [n, size] in place, and normalise the sum as ``rms_norm`` does."""


class NormThenLinear:
    """A norm, then a projection.

    Args:
        norms: Of the backend.
        gain: [in_features], of the norm.
        linear: The projection.
    """

    def __init__(self, norms: Norms, gain: torch.Tensor, linear: Linear) -> None:
        self._norms = norms
        self._gain = gain
        self._linear = linear

    def __call__(self, x: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``x`` (if any) to the residual in place, normalise the sum, and project it."""
        if x is None:
            normed = self._norms.rms_norm(residual, self._gain)
        else:
            normed = self._norms.add_rms_norm(x, residual, self._gain)
        return self._linear(normed), residual
