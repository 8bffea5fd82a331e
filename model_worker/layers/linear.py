"""x · weightᵀ + bias, with the weight laid out once for the machine that runs it; and what stands around it."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F


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
        """Normalise rows."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place and normalise the sum."""


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


class LinearThenSilu:
    """A projection to gate and up, then silu(gate) · up.

    Args:
        linear: The projection.
        silu_mul: Of the backend.
    """

    def __init__(self, linear: Linear, silu_mul: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._linear = linear
        self._silu_mul = silu_mul

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Map [n, in_features] to [n, half the projection's out_features]."""
        return self._silu_mul(self._linear(x))


class PlainLinear:
    """torch's own product.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Map [n, in_features] to [n, out_features]."""
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """oneDNN's product over a weight in oneDNN's blocked layout; the plain weight may be let go.

    Laying out anew in each call is what makes the plain product slow for few rows: two cores with AVX-512 bf16 take
    for SmolLM2-135M's products 20 ms plain and 11 ms packed at 1 row, 31 and 17 at 16, 75 and 49 at 64.

    Args:
        weight: [out_features, in_features], CPU.
        bias: [out_features] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Map [n, in_features] to [n, out_features]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN's packed product for ``dtype`` on this CPU."""
    ops = torch.ops.mkldnn
    if not (torch._C._has_mkldnn and hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and bool(ops._is_mkldnn_bf16_supported()))
