"""One row times a weight, with the residual sum and RMSNorm before it done on the way.

    s = residual + x, out = weight · (s / sqrt(mean(s²) + eps) · gain) + bias

At one row a kernel's launch and its ramp cost as much as its work, so every program computes the row anew from the
caches instead of waiting for a kernel that would. The mean divides out: it is summed along with the product and applied
at its end. Each program takes a few whole rows of the weight, loaded before it waits for the kernel that makes x.
Products and sums in float32. (SiLU · mul on the way does not pay: each program would take all exponentials of the row.)
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.launch import dependent_launch, wait_for_previous
from lightserve.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference


def norm_gemv_reference(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``norm_gemv`` does, in plain torch."""
    residual = residual.clone()
    normed = rms_norm_reference(residual, gain, eps) if x is None else add_rms_norm_reference(x, residual, gain, eps)
    return torch.nn.functional.linear(normed, weight, bias), residual


def norm_gemv(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``x`` to the residual, normalise the sum, multiply.

    Args:
        x: [1, k], any float dtype; None: nothing is added.
        residual: [1, k], same dtype; left as it is.
        gain: [k], of the norm.
        eps: Added to the mean square.
        weight: [n, k] contiguous, same dtype.
        bias: [n].

    Returns:
        [1, n], and the sum [1, k].

    Raises:
        ValueError: The shapes do not fit.
    """
    n, k = weight.shape
    if residual.shape != (1, k) or gain.shape != (k,) or (x is not None and x.shape != (1, k)):
        raise ValueError(f"residual {tuple(residual.shape)}, gain and x must be one row that fits weight {(n, k)}")
    if not weight.is_contiguous():
        raise ValueError("weight must be contiguous")
    out = residual.new_empty(1, n)
    total = torch.empty_like(residual)
    block_k = triton.next_power_of_2(k)
    block_n = max(TILE // block_k, 1)
    _norm_gemv_kernel[(triton.cdiv(n, block_n),)](
        residual if x is None else x,
        residual,
        gain,
        weight,
        weight if bias is None else bias,
        out,
        total,
        eps,
        n,
        K=k,
        ADD=x is not None,
        BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8,
        **dependent_launch(residual),
    )
    return out, total


TILE = 16384  # of the weight: 128 bytes for each thread, so that three programs keep a multiprocessor's loads in flight


@triton.jit
def _norm_gemv_kernel(
    x,
    residual,
    gain,
    weight,
    bias,
    out,
    total,
    eps,
    n,
    K: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)[None, :]
    inside = column < K
    line = tl.minimum(row, n - 1).to(tl.int64)[:, None]
    w = tl.load(weight + line * K + column, mask=inside, other=0)
    factor = tl.load(gain + column, mask=inside, other=0).to(tl.float32)
    wait_for_previous(PDL)
    value = tl.load(x + column, mask=inside, other=0).to(tl.float32)
    if ADD:
        value += tl.load(residual + column, mask=inside, other=0).to(tl.float32)
    rounded = value.to(x.dtype.element_ty)
    tl.store(total + column, rounded, mask=column + tl.program_id(0) * K < K)  # the first program's task
    value = rounded.to(tl.float32)
    result = tl.sum(w.to(tl.float32) * (value * factor), 1) * tl.rsqrt(tl.sum(value * value) / K + eps)
    if BIAS:
        result += tl.load(bias + row, mask=row < n, other=0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < n)
