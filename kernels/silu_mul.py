"""SiLU of the gate times the up projection: out = gate / (1 + exp(-gate)) · up, in float32, rounded once.

One program per row and block of columns.
"""

import torch


def silu_mul_reference(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Do what ``silu_mul`` does, in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * up
    return product.to(gate_up.dtype) if out is None else out.copy_(product)
