"""RMSNorm, alone and with the residual addition before it.

    rms_norm(x) = x / sqrt(mean(x²) + eps) · weight
    add_rms_norm(x, residual): residual += x, then rms_norm(residual)

One program per row; squares, mean and product in float32, rounded once at the end.
"""

import torch


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what ``rms_norm`` does, in plain torch."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype) if out is None else out.copy_(normed)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what ``add_rms_norm`` does, in plain torch."""
    residual.add_(x)
    return rms_norm_reference(residual, weight, eps, out=out)
