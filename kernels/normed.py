"""An RMSNorm in two halves, for few rows: the product that makes a sum, and the product that reads the sum's norm.

    rows = sum · gain,  square_sums = parts of Σ sum² of each row
    rms_norm(sum) · weightᵀ = rsqrt(Σ square_sums / size + eps) · (rows · weightᵀ)

So no kernel stands between the two, and none waits for all of a row before it begins.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """What the rows of an RMSNorm are still to be multiplied by.

    Attributes:
        square_sums: [num_parts, n] float32, parts of each row's sum of squares.
        eps: Added to their mean.
    """

    square_sums: torch.Tensor
    eps: float

    def factors(self, size: int) -> torch.Tensor:
        """Compute the factor of each row of ``size`` numbers: [n, 1] float32."""
        return torch.rsqrt(self.square_sums.sum(0) / size + self.eps)[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """Rows of an RMSNorm.

    Attributes:
        rows: [n, size].
        scaling: What they are still to be multiplied by; None: nothing.
    """

    rows: torch.Tensor
    scaling: Scaling | None = None
