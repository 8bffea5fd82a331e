"""silu(x · gateᵀ) · (x · upᵀ) for many rows of x, without writing the two products.

Gate and up alternate in the weight, so a thread holds both of a feature and multiplies them in registers. One program
on each multiprocessor takes tile after tile, through groups of a few rows of tiles, so that what runs together shares x
and the weight in the second-level cache. Sums in float32, rounded once.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from lightserve.kernels.checks import check_contiguous
from lightserve.kernels.dot import dot
from lightserve.kernels.gemv import check_weight, gemv_reference, is_gated
from lightserve.kernels.launch import dependent_launch, fits_tma, has_tma, num_multiprocessors, wait_for_previous

gated_gemm_reference = gemv_reference

_BLOCK_M, _BLOCK_N, _BLOCK_K = 128, 128, 64  # rows, features, columns of a tile
_GROUP = 8  # rows of tiles


def gated_gemm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Give SiLU of the product with gate, times the product with up.

    Args:
        x: [m, k] contiguous, bfloat16 or float16, k a multiple of 8.
        weight: [n, 2, k] contiguous, same dtype, n a multiple of 8: of each feature the gate's row, then up's.
        out: [m, n] contiguous, same dtype; made when not given.

    Raises:
        ValueError: A shape does not fit, what must be contiguous is not, or rows do not begin at multiples of 16 bytes.
    """
    m, k = x.shape
    check_contiguous((m, k), x=x)
    n = check_weight(weight, None, k)
    if not is_gated(weight):
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} must have a row of gate and one of up for each feature"
        )
    out = x.new_empty(m, n) if out is None else out
    check_contiguous((m, n), out=out)
    flat_weight = weight.flatten(0, 1)
    for name, matrix in {"x": x, "weight": flat_weight, "out": out}.items():
        if not fits_tma(matrix):
            raise ValueError(f"rows of {name} of shape {tuple(matrix.shape)} must begin at multiples of 16 bytes")
    if m == 0:
        return out
    num_tiles = triton.cdiv(m, _BLOCK_M) * triton.cdiv(n, _BLOCK_N)
    num_programs = min(num_multiprocessors(x.device), num_tiles)
    _gated_gemm_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(x, [_BLOCK_M, _BLOCK_K]),
        TensorDescriptor.from_tensor(flat_weight, [2 * _BLOCK_N, _BLOCK_K]),
        TensorDescriptor.from_tensor(out, [_BLOCK_M, _BLOCK_N]),
        num_programs,
        m,
        n,
        k,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        GROUP=_GROUP,
        num_warps=8,
        num_stages=3,
        **dependent_launch(x),
    )
    return out


def is_weight_for_gated_gemm(weight: torch.Tensor) -> bool:
    """Say whether ``gated_gemm`` takes a weight, on its device (Hopper and later)."""
    fits = weight.is_contiguous() and fits_tma(weight.flatten(0, 1)) and len(weight) * weight.itemsize % 16 == 0
    return fits and weight.itemsize == 2 and has_tma(weight.device)


@triton.jit(do_not_specialize=["num_programs", "m"])
def _gated_gemm_kernel(
    x_tiles,
    weight_tiles,
    out_tiles,
    num_programs,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    tile_rows, tile_columns = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    wait_for_previous(PDL)
    for tile in tl.range(tl.program_id(0), tile_rows * tile_columns, num_programs):
        group_start = tile // (GROUP * tile_columns) * GROUP
        in_group = tile % (GROUP * tile_columns)
        group_rows = tl.minimum(tile_rows - group_start, GROUP)
        row = (group_start + in_group % group_rows) * BLOCK_M
        column = in_group // group_rows * BLOCK_N
        both = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for start in range(0, k, BLOCK_K):
            weight_tile = weight_tiles.load([2 * column, start])
            both = dot(x_tiles.load([row, start]), tl.trans(weight_tile), both)
        gate, up = tl.split(tl.reshape(both, [BLOCK_M, BLOCK_N, 2]))
        product = gate * tl.sigmoid(gate) * up
        out_tiles.store([row, column], product.to(out_tiles.dtype))
