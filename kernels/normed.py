"""An RMSNorm in two halves, for few rows: the product that makes a sum, and the product that reads the sum's norm.

    rows = sum · gain,  square_sums = parts of Σ sum² of each row
    rms_norm(sum) · weightᵀ = rsqrt(Σ square_sums / size + eps) · (rows · weightᵀ)

So no kernel stands between the two, and none waits for all of a row before it begins. What comes out is rounded once
less than by ``rms_norm``; ``rows`` is rounded before the scaling instead of after it.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Normed:
    """Rows of an RMSNorm.

    Attributes:
        rows: [n, size].
        square_sums: [num_parts, n] float32: what their scaling is computed from; None: they are scaled.
    """

    rows: torch.Tensor
    square_sums: torch.Tensor | None = None


def scale_reference(square_sums: torch.Tensor, size: int, eps: float) -> torch.Tensor:
    """Compute what each row is still to be multiplied by: [n, 1] float32."""
    return torch.rsqrt(square_sums.sum(0) / size + eps)[:, None]
