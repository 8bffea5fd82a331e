"""SiLU of the gate times the up projection: out = gate / (1 + exp(-gate)) · up, in float32, rounded once.

One program per row and block of columns.
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.checks import check_contiguous
from lightserve.kernels.launch import dependent_launch, wait_for_previous


def silu_mul_reference(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Do what ``silu_mul`` does, in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * up
    return product.to(gate_up.dtype) if out is None else out.copy_(product)


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply SiLU of the first half of each row with the second half.

    Args:
        gate_up: [num_tokens, 2 · ffn] contiguous, any float dtype.
        out: [num_tokens, ffn] contiguous; made when not given.

    Raises:
        ValueError: A shape does not fit, or what must be contiguous is not.
    """
    num_tokens, width = len(gate_up), gate_up.shape[-1]
    check_contiguous((num_tokens, width), gate_up=gate_up)
    if width % 2:
        raise ValueError(f"gate_up of shape {tuple(gate_up.shape)} must have rows of an even width")
    ffn = width // 2
    out = gate_up.new_empty(num_tokens, ffn) if out is None else out
    check_contiguous((num_tokens, ffn), out=out)
    if num_tokens == 0:
        return out
    block = min(triton.next_power_of_2(ffn), 1024)
    _silu_mul_kernel[(num_tokens, triton.cdiv(ffn, block))](
        gate_up, out, ffn, BLOCK=block, num_warps=4, **dependent_launch(gate_up)
    )
    return out


@triton.jit
def _silu_mul_kernel(gate_up, out, ffn, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < ffn
    wait_for_previous(PDL)
    gate = tl.load(gate_up + row * 2 * ffn + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * ffn + ffn + column, mask=inside, other=0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * ffn + column, product.to(out.dtype.element_ty), mask=inside)
