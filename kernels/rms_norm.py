"""RMSNorm, alone and with the residual addition before it.

    rms_norm(x) = x / sqrt(mean(x²) + eps) · gain
    add_rms_norm(x, residual): residual += x, then rms_norm(residual)

One program per row; squares, mean and product in float32, rounded once at the end.
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.checks import check_contiguous, check_rows
from lightserve.kernels.launch import dependent_launch, wait_for_previous


def rms_norm_reference(
    x: torch.Tensor, gain: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what ``rms_norm`` does, in plain torch."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain.float()
    return normed.to(x.dtype) if out is None else out.copy_(normed)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what ``add_rms_norm`` does, in plain torch."""
    residual.add_(x)
    return rms_norm_reference(residual, gain, eps, out=out)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Normalise each row of ``x``.

    Args:
        x: [num_tokens, hidden], any float dtype; rows may be strided, their elements not.
        gain: [hidden] contiguous.
        eps: Added to the mean square.
        out: [num_tokens, hidden] contiguous; made when not given.

    Raises:
        ValueError: A shape does not fit, or what must be contiguous is not.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _check(x, gain, out)
    if x.shape[0]:
        _launch(x, x, gain, eps, out, add=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Add ``x`` to ``residual`` in place, then normalise each row of the sum (as rounded to its dtype).

    Args:
        x: [num_tokens, hidden], any float dtype; rows may be strided, their elements not.
        residual: [num_tokens, hidden] contiguous, same dtype, changed.
        gain: [hidden] contiguous.
        eps: Added to the mean square.
        out: [num_tokens, hidden] contiguous, may be ``x``; made when not given.

    Raises:
        ValueError: A shape does not fit, or what must be contiguous is not.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _check(x, gain, out)
    check_contiguous(x.shape, residual=residual)
    if x.shape[0]:
        _launch(x, residual, gain, eps, out, add=True)
    return out


def _check(x: torch.Tensor, gain: torch.Tensor, out: torch.Tensor) -> None:
    check_rows(len(x), 1, x=x)
    check_contiguous(x.shape[1:], gain=gain)
    check_contiguous(x.shape, out=out)


def _launch(
    x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float, out: torch.Tensor, *, add: bool
) -> None:
    num_tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(num_tokens,)](
        x,
        residual,
        gain,
        out,
        eps,
        x.stride(0),
        hidden,
        ADD=add,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),  # two 16-byte loads of bfloat16 per thread
        **dependent_launch(x),
    )


@triton.jit
def _rms_norm_kernel(
    x, residual, gain, out, eps, x_stride, hidden, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    wide_gain = tl.load(gain + column, mask=inside, other=0).to(tl.float32)
    wait_for_previous(PDL)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0)
    if ADD:
        before = tl.load(residual + row * hidden + column, mask=inside, other=0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(value.dtype)
        tl.store(residual + row * hidden + column, value, mask=inside)
    wide = value.to(tl.float32)
    mean_square = tl.sum(wide * wide) / hidden
    normed = wide * tl.rsqrt(mean_square + eps) * wide_gain
    tl.store(out + row * hidden + column, normed.to(out.dtype.element_ty), mask=inside)
