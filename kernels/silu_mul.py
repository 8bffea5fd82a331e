"""SiLU of the gate times the up projection: out = gate / (1 + exp(-gate)) · up, in float32, rounded once.

Gate and up alternate in a row, as a product with rows of both leaves them. One program per row and block of columns.
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.checks import check_contiguous
from lightserve.kernels.launch import dependent_launch, wait_for_previous


def silu_mul_reference(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Do what ``silu_mul`` does, in plain torch."""
    gate, up = gate_up.float().unbind(-1)
    product = torch.nn.functional.silu(gate) * up
    return product.to(gate_up.dtype) if out is None else out.copy_(product)


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply SiLU of each gate with its up.

    Args:
        gate_up: [num_tokens, ffn, 2] contiguous, any float dtype.
        out: [num_tokens, ffn] contiguous; made when not given.

    Raises:
        ValueError: A shape does not fit, or what must be contiguous is not.
    """
    num_tokens, ffn = len(gate_up), gate_up.shape[-2]
    check_contiguous((num_tokens, ffn, 2), gate_up=gate_up)
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
    start = tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    wide_column = 2 * start + tl.arange(0, 2 * BLOCK)
    wait_for_previous(PDL)
    both = tl.load(gate_up + row * (2 * ffn) + wide_column, mask=wide_column < 2 * ffn, other=0).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, [BLOCK, 2]))
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * ffn + column, product.to(out.dtype.element_ty), mask=column < ffn)
