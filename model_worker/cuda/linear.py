"""Products on a GPU: our own kernel where it is faster, for few rows, the library beyond."""

import torch
import torch.nn.functional as F

from lightserve.kernels.silu_mul import silu_mul
from lightserve.kernels.skinny_gemm import MAX_ROWS, skinny_gemm


class CudaLinear:
    """Implements ``Linear``, with silu(gate) * up after it if asked.

    Args:
        weight: [out_features, in_features]; gated: gate, then up.
        bias: [out_features] or None.
        gated: Whether half as many features come out.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False) -> None:
        self._weight = weight
        self._bias = bias
        self._gated = gated

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Map [n, in_features] to the features."""
        if self._weight.itemsize == 2 and len(x) <= MAX_ROWS:
            return skinny_gemm(x, self._weight, self._bias, gated=self._gated)
        product = F.linear(x, self._weight, self._bias)
        return silu_mul(product) if self._gated else product


class CudaHead:
    """The projection to logits, in float32: bfloat16 would round a logit of 25 to steps of 0.125 and make ties.

    Args:
        weight: [vocab_rows, hidden_size].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Map [n, hidden_size] to [n, vocab_rows] float32."""
        if self._weight.itemsize == 2 and len(x) <= MAX_ROWS:
            out = torch.empty(len(x), len(self._weight), dtype=torch.float32, device=x.device)
            return skinny_gemm(x, self._weight, out=out)
        if x.dtype is torch.float32:
            return F.linear(x, self._weight)
        return torch.mm(x, self._weight.t(), out_dtype=torch.float32)
