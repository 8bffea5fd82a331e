"""One row times a weight, with what comes before it done on the way: the residual sum and RMSNorm, or SiLU · mul.

    norm_gemv: s = residual + x, out = weight · (s / sqrt(mean(s²) + eps) · gain) + bias
    silu_gemv: out = weight · (gate / (1 + exp(-gate)) · up)

At one row a kernel's launch and its ramp cost as much as its work, so every program computes the row anew from the
caches instead of waiting for a kernel that would. The mean divides out: it is summed along with the product and applied
at its end. Each program takes a few whole rows of the weight, loaded before it waits for the kernel that makes x.
Products and sums in float32.
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.launch import dependent_launch, wait_for_previous
from lightserve.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from lightserve.kernels.silu_mul import silu_mul_reference


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


def silu_gemv_reference(gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Do what ``silu_gemv`` does, in plain torch."""
    return torch.nn.functional.linear(silu_mul_reference(gate_up), weight)


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
    _check(residual, weight, residual.shape[1])
    if gain.shape != residual.shape[1:] or (x is not None and x.shape != residual.shape):
        raise ValueError(f"x and gain {tuple(gain.shape)} must be as wide as residual {tuple(residual.shape)}")
    out = residual.new_empty(1, weight.shape[0])
    total = torch.empty_like(residual)
    _launch(residual if x is None else x, residual, gain, weight, bias, out, total, eps, "norm" if x is None else "add")
    return out, total


def silu_gemv(gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply SiLU of the first half of the row with the second half, then with a weight.

    Args:
        gate_up: [1, 2 · k] contiguous, any float dtype.
        weight: [n, k] contiguous, same dtype.

    Returns:
        [1, n].

    Raises:
        ValueError: The shapes do not fit.
    """
    _check(gate_up, weight, gate_up.shape[1] // 2)
    out = gate_up.new_empty(1, weight.shape[0])
    _launch(gate_up, gate_up, gate_up, weight, None, out, gate_up, 0.0, "silu")
    return out


def _check(x: torch.Tensor, weight: torch.Tensor, k: int) -> None:
    if x.shape[0] != 1 or weight.shape[1] != k or not weight.is_contiguous() or not x.is_contiguous():
        raise ValueError(f"{tuple(x.shape)} must be one row that fits weight {tuple(weight.shape)}")


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    kind: str,
) -> None:
    n, k = weight.shape
    block_k = triton.next_power_of_2(k)
    block_n = max(TILE // block_k, 1)
    _fused_gemv_kernel[(triton.cdiv(n, block_n),)](
        x,
        residual,
        gain,
        weight,
        weight if bias is None else bias,
        out,
        total,
        eps,
        n,
        K=k,
        KIND=kind,
        BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8,
        **dependent_launch(x),
    )


TILE = 16384  # of the weight: 128 bytes for each thread, so that three programs keep a multiprocessor's loads in flight


@triton.jit
def _fused_gemv_kernel(
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
    KIND: tl.constexpr,
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
    if KIND != "silu":
        factor = tl.load(gain + column, mask=inside, other=0).to(tl.float32)
    wait_for_previous(PDL)
    value = tl.load(x + column, mask=inside, other=0).to(tl.float32)
    if KIND == "silu":
        value = value * tl.sigmoid(value) * tl.load(x + K + column, mask=inside, other=0).to(tl.float32)
    if KIND == "add":
        value += tl.load(residual + column, mask=inside, other=0).to(tl.float32)
    if KIND == "silu":
        result = tl.sum(w.to(tl.float32) * value, 1)
    else:
        rounded = value.to(x.dtype.element_ty)
        value = rounded.to(tl.float32)
        tl.store(total + column, rounded, mask=column + tl.program_id(0) * K < K)  # the first program's task
        result = tl.sum(w.to(tl.float32) * (value * factor), 1) * tl.rsqrt(tl.sum(value * value) / K + eps)
    if BIAS:
        result += tl.load(bias + row, mask=row < n, other=0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < n)
