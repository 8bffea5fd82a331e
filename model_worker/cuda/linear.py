"""Products on a GPU: our own kernels where they are faster (few rows; gate and up of many), else the library's."""

import torch
import torch.nn.functional as F

from lightserve.kernels.gated_gemm import gated_gemm, is_weight_for_gated_gemm
from lightserve.kernels.normed import Normed
from lightserve.kernels.silu_mul import silu_mul
from lightserve.kernels.skinny_gemm import MAX_ROWS, skinny_gemm, skinny_gemm_add_norm
from lightserve.model_worker.layers.linear import LinearAddNorm

# From here on gate and up are faster with SiLU · mul in the same kernel than with the library's product and another.
FUSED_ROWS = 1024


class CudaLinear:
    """Implements ``Linear``.

    Args:
        weight: [out_features, in_features].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Map [n, in_features] to the features."""
        return skinny_gemm(x, self._weight) if _is_skinny(x, self._weight) else F.linear(x, self._weight)


class CudaNormedLinear:
    """Implements ``NormedLinear``.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, normed: Normed, /) -> torch.Tensor:
        """Map [n, in_features] to the features."""
        rows, scaling = normed.rows, normed.scaling
        if scaling is not None or _is_skinny(rows, self._weight):
            return skinny_gemm(rows, self._weight, self._bias, scaling=scaling)
        return F.linear(rows, self._weight, self._bias)


class CudaNormedGatedLinear:
    """Implements ``NormedLinear`` with silu(gate) * up after it.

    Args:
        weight: [out_features, 2, in_features], of each feature the gate's row, then up's.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._flat_weight = weight.flatten(0, 1)
        self._fuses = is_weight_for_gated_gemm(weight)

    def __call__(self, normed: Normed, /) -> torch.Tensor:
        """Map [n, in_features] to the features."""
        x, scaling = normed.rows, normed.scaling
        if scaling is not None or _is_skinny(x, self._weight):
            return skinny_gemm(x, self._weight, scaling=scaling)
        if self._fuses and len(x) >= FUSED_ROWS:
            return gated_gemm(x, self._weight)
        return silu_mul(F.linear(x, self._flat_weight).view(len(x), *self._weight.shape[:2]))


class CudaLinearAddNorm:
    """Implements ``LinearAddNorm`` of one rank: for few rows in one kernel, whose scaling the next product does.

    Not for one row, whose product ``gemv`` does faster.

    Args:
        weight: [size, in_features]; not float16, in which a sum times its gain may overflow.
        gain: [size], of the norm.
        eps: Of the norm.
        apart: Does it one after the other.
    """

    def __init__(self, weight: torch.Tensor, gain: torch.Tensor, eps: float, apart: LinearAddNorm) -> None:
        self._weight = weight
        self._gain = gain
        self._eps = eps
        self._apart = apart

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, *, out: torch.Tensor | None = None) -> Normed:
        """Project, add, normalise."""
        if out is None and 2 <= len(x) <= MAX_ROWS:
            return skinny_gemm_add_norm(x, self._weight, residual, self._gain, self._eps)
        return self._apart(x, residual, out=out)


class CudaHead:
    """The projection to logits, in float32: bfloat16 would round a logit of 25 to steps of 0.125 and make ties.

    Args:
        weight: [vocab_rows, hidden_size].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Map [n, hidden_size] to [n, vocab_rows] float32."""
        if _is_skinny(x, self._weight):
            out = torch.empty(len(x), len(self._weight), dtype=torch.float32, device=x.device)
            return skinny_gemm(x, self._weight, out=out)
        if x.dtype is torch.float32:
            return F.linear(x, self._weight)
        return torch.mm(x, self._weight.t(), out_dtype=torch.float32)


def _is_skinny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return weight.itemsize == 2 and len(x) <= MAX_ROWS
