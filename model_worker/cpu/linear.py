"""Products on a CPU: oneDNN's over weights laid out once, where this torch has it, else torch's own."""

import torch
import torch.nn.functional as F

from lightserve.kernels.normed import Normed
from lightserve.model_worker.layers.linear import Linear


class LinearOfNormed:
    """Implements ``NormedLinear``: norms on a CPU are always complete.

    Args:
        linear: The projection.
    """

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, normed: Normed, /) -> torch.Tensor:
        """Map [n, in_features] to [n, out_features]."""
        return self._linear(normed.rows)


class LinearThenSilu:
    """A projection to gate and up, then silu(gate) · up.

    Args:
        linear: The projection; gate, then up.
    """

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Map [n, in_features] to [n, half the projection's out_features]."""
        gate, up = self._linear(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


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
