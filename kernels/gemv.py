"""x · weightᵀ for one row of x, where reading the weight is all the cost.

    plain:  out = x · weightᵀ + bias
    gated:  weight holds two rows for each feature, gate and up: out = silu(x · gateᵀ) · (x · upᵀ)

Each program takes a few whole rows of the weight, all of them loaded before it waits for the kernel that makes x.
Products and sums in float32. (To compute the RMSNorm before the product in each program anew does not pay: 4.14 ms
instead of 3.64 for the layers of an 8B, no difference for those of a 1B.)
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lightserve.kernels.checks import check_contiguous
from lightserve.kernels.launch import dependent_launch, wait_for_previous
from lightserve.kernels.silu_mul import silu_mul_reference


def gemv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what ``gemv`` does, in plain torch, for any number of rows."""
    product = torch.nn.functional.linear(x, weight.flatten(0, -2), bias)
    product = silu_mul_reference(product.unflatten(1, weight.shape[:-1])) if is_gated(weight) else product
    return product if out is None else out.copy_(product)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply one row with a weight.

    Args:
        x: [1, k] contiguous, any float dtype.
        weight: [n, k] contiguous, same dtype; or gated, [n, 2, k]: of each feature the gate's row, then up's.
        bias: [n] contiguous; not if gated.
        out: [1, n] contiguous, any float dtype; made when not given.

    Raises:
        ValueError: A shape does not fit, what must be contiguous is not, or a gated weight has a bias.
    """
    k = x.shape[-1]
    check_contiguous((1, k), x=x)
    n = check_weight(weight, bias, k)
    out = x.new_empty(1, n) if out is None else out
    check_contiguous((1, n), out=out)
    gated = is_gated(weight)
    rule = launch_rule(k, gated=gated)
    _gemv_kernel[(triton.cdiv(n, rule.block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        n,
        K=k,
        GATED=gated,
        BIAS=bias is not None,
        BLOCK_N=rule.block_n,
        BLOCK_K=rule.block_k,
        num_warps=rule.num_warps,
        **dependent_launch(x),
    )
    return out


def is_gated(weight: torch.Tensor) -> bool:
    """Say whether a weight holds rows of gate and up."""
    return weight.dim() == 3


def check_weight(weight: torch.Tensor, bias: torch.Tensor | None, k: int) -> int:
    """Check a weight for rows of ``k``, and its bias; give the number of features that come out.

    Raises:
        ValueError: As ``gemv`` does.
    """
    n = len(weight)
    check_contiguous((n, 2, k) if is_gated(weight) else (n, k), weight=weight)
    if bias is not None and is_gated(weight):
        raise ValueError(f"bias of shape {tuple(bias.shape)} must not be given with a gated weight")
    if bias is not None:
        check_contiguous((n,), bias=bias)
    return n


@dataclass(frozen=True)
class LaunchRule:
    """How the weight is cut: rows of a program, elements loaded of each at a time, warps."""

    block_n: int
    block_k: int
    num_warps: int


def launch_rule(k: int, *, gated: bool) -> LaunchRule:
    """Give each thread 32 to 128 bytes of the weight to wait for, up to a k of 16,384.

    8 warps and pieces of 1,024 take 0.3 to 0.5 µs less for each product of the 8B than pieces of 4,096.
    """
    rows = max(4096 // (2 * k if gated else k), 1)
    block_k = min(triton.next_power_of_2(k), 1024)
    return LaunchRule(block_n=triton.next_power_of_2(rows), block_k=block_k, num_warps=8 if k >= 4096 else 4)


@triton.jit
def _gemv_kernel(
    x,
    weight,
    bias,
    out,
    n,
    K: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ptrs = weight + tl.minimum(row, n - 1).to(tl.int64)[:, None] * (2 * K if GATED else K)
    gate, up = (), ()
    for part in tl.static_range(PARTS):
        column = part * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        gate = gate + (_load(row_ptrs + column, column, K, BLOCK_K),)  # type: ignore[assignment]  # a longer tuple
        if GATED:
            up = up + (_load(row_ptrs + K + column, column, K, BLOCK_K),)  # type: ignore[assignment]  # a longer tuple
    wait_for_previous(PDL)
    products = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_products = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for part in tl.static_range(PARTS):
        column = part * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        value = _load(x + column, column, K, BLOCK_K).to(tl.float32)
        products += gate[part].to(tl.float32) * value
        if GATED:
            up_products += up[part].to(tl.float32) * value
    result = tl.sum(products, 1)
    if GATED:
        result = result * tl.sigmoid(result) * tl.sum(up_products, 1)
    if BIAS:
        result += tl.load(bias + row, mask=row < n, other=0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < n)


@triton.jit
def _load(address, column, K: tl.constexpr, BLOCK_K: tl.constexpr):
    if K % BLOCK_K == 0:
        return tl.load(address)
    return tl.load(address, mask=column < K, other=0)
