"""Products on a GPU: our own kernel where it is faster, for few rows, the library beyond."""

import torch
import torch.nn.functional as F

from lightserve.kernels.norm_gemv import norm_gemv
from lightserve.kernels.skinny_gemm import skinny_gemm, skinny_pays
from lightserve.model_worker.layers.linear import Norms, NormThenLinear

# Width up to which norm and product of one row are one kernel: that takes a 1B's step from 1.03 to 1.00 ms.
FUSED_MAX_WIDTH = 2048


class CudaLinear:
    """Implements ``Linear``.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Map [n, in_features] to [n, out_features]."""
        if self._weight.itemsize == 2 and skinny_pays(x.shape[0], self._weight.shape[0]):
            return skinny_gemm(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


class CudaNormLinear(NormThenLinear):
    """Implements ``NormLinear``: one kernel for one row that is not too wide."""

    def __init__(
        self, norms: Norms, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__(norms, gain, eps, CudaLinear(weight, bias))
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``x`` (if any) to the residual, normalise the sum, and project it."""
        if residual.shape[0] == 1 and residual.shape[1] <= FUSED_MAX_WIDTH:
            return norm_gemv(x, residual, self._gain, self._eps, self._weight, self._bias)
        return super().__call__(x, residual)


class CudaHead:
    """The projection to logits, in float32: bfloat16 would round a logit of 25 to steps of 0.125 and make ties.

    Args:
        weight: [vocab_rows, hidden_size].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Map [n, hidden_size] to [n, vocab_rows] float32."""
        if self._weight.itemsize == 2 and skinny_pays(x.shape[0], self._weight.shape[0]):
            out = torch.empty(x.shape[0], self._weight.shape[0], dtype=torch.float32, device=x.device)
            return skinny_gemm(x, self._weight, out=out)
        if x.dtype is torch.float32:
            return F.linear(x, self._weight)
        return torch.mm(x, self._weight.t(), out_dtype=torch.float32)
