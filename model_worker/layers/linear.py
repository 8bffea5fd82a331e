"""x · weightᵀ + bias, with the weight laid out once for the machine that runs it."""

from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """A projection with its weight."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, in_features] to [n, out_features]."""


class PlainLinear:
    """torch's own product.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, in_features] to [n, out_features]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN's packed product for ``dtype``."""
    ops = torch.ops.mkldnn
    available = torch._C._has_mkldnn and hasattr(ops, "_reorder_linear_weight")
    return available and dtype in (torch.bfloat16, torch.float32) and hasattr(ops, "_linear_pointwise")
