"""x · weightᵀ for few rows of x, where reading the weight is all the cost.

    plain:  out = x · weightᵀ + bias
    gated:  weight holds two rows for each feature, gate and up: out = silu(x · gateᵀ) · (x · upᵀ)
    scaled: x is rows of an RMSNorm whose scaling is left to the product
    add_norm: residual += x · weightᵀ, and out is the sum's RMSNorm, its scaling left to the next product

A program takes some rows of the weight and a part of k, streamed through the tensor cores; the last part to arrive adds
all of them in a fixed order. Products and sums in float32. One row alone is left to ``gemv``. While a program waits for
the kernel that makes x, the beginning of each of its rows of the weight is fetched into the second-level cache.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from lightserve.kernels.checks import check_contiguous, check_rows
from lightserve.kernels.dot import dot
from lightserve.kernels.gemv import check_weight, gemv, gemv_reference, is_gated
from lightserve.kernels.launch import dependent_launch, fits_tma, has_tma, prefetch, wait_for_previous
from lightserve.kernels.normed import Normed, Scaling

MAX_ROWS = 64


def skinny_gemm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scaling: Scaling | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what ``skinny_gemm`` does, in plain torch, for any number of rows."""
    if scaling is not None:
        x = (x * scaling.factors(x.shape[1])).to(x.dtype)
    return gemv_reference(x, weight, bias, out=out)


def skinny_gemm_add_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float
) -> Normed:
    """Do what ``skinny_gemm_add_norm`` does, in plain torch, with square sums of one part."""
    residual.add_(gemv_reference(x, weight))
    return Normed(residual * gain, Scaling(residual.float().square().sum(1)[None], eps))


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scaling: Scaling | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply at most ``MAX_ROWS`` rows with a weight.

    Args:
        x: [m, k], any float dtype; rows may be strided, their elements not.
        weight: [n, k] contiguous, same dtype; or gated, [n, 2, k]: of each feature the gate's row, then up's.
        bias: [n] contiguous; not if gated.
        scaling: What the rows of ``x`` are still to be multiplied by; contiguous.
        out: [m, n] contiguous, any float dtype; made when not given.

    Raises:
        ValueError: A shape does not fit, ``x`` has too many rows, what must be contiguous is not, or a gated weight has
            a bias.
    """
    m = len(x)
    if m == 1 and scaling is None:
        return gemv(x, weight, bias, out=out)
    _check_rows(x)
    n = check_weight(weight, bias, x.shape[1])
    out = x.new_empty(m, n) if out is None else out
    check_contiguous((m, n), out=out)
    if scaling is not None:
        check_contiguous((len(scaling.square_sums), m), square_sums=scaling.square_sums)
    if m:
        _launch(x, weight, out, launch_rule(m, n, gated=is_gated(weight)), bias=bias, scaling=scaling)
    return out


def skinny_gemm_add_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
) -> Normed:
    """Add a product of at most ``MAX_ROWS`` rows to the residual; give the RMSNorm of the sum, its scaling left out.

    Args:
        x: [m, k], float32 or bfloat16 (in float16 a sum times its gain may overflow); rows may be strided, their
            elements not.
        weight: [n, k] contiguous, same dtype.
        residual: [m, n] contiguous, same dtype, changed; rounded as ``add_rms_norm`` rounds it.
        gain: [n] contiguous, of the norm.
        eps: Of the norm.
        out: [m, n] contiguous, for the rows; made when not given.

    Raises:
        ValueError: A shape or the residual's dtype does not fit, ``x`` has too many rows, or what must be contiguous is
            not.
    """
    m = len(x)
    _check_rows(x)
    n = check_weight(weight, None, x.shape[1])
    out = torch.empty_like(residual) if out is None else out
    check_contiguous((m, n), residual=residual, out=out)
    check_contiguous((n,), gain=gain)
    if residual.dtype is not x.dtype:
        raise ValueError(f"residual in {residual.dtype} must be in {x.dtype}, as x is")
    rule = launch_rule(m, n, gated=False)
    square_sums = torch.empty(triton.cdiv(n, rule.block_n), m, dtype=torch.float32, device=x.device)
    if m:
        _launch(x, weight, out, rule, add_norm=_AddNorm(residual, gain, square_sums))
    return Normed(out, Scaling(square_sums, eps))


class _AddNorm(NamedTuple):
    """What a product is added to, the norm's gain, and where square sums go."""

    residual: torch.Tensor
    gain: torch.Tensor
    square_sums: torch.Tensor


def _check_rows(x: torch.Tensor) -> None:
    if len(x) > MAX_ROWS:
        raise ValueError(f"x of shape {tuple(x.shape)} must have at most {MAX_ROWS} rows")
    check_rows(len(x), 1, x=x)


@dataclass(frozen=True)
class TileRule:
    """How the weight is cut.

    Attributes:
        block_n: Features of a tile.
        block_k: Its columns, of 2 bytes; half as many of 4.
        split_k: Parts of k.
        num_warps: Of a program.
        num_stages: Of its pipeline.
        by_tma: Tiles are copied by the tensor memory accelerator, if there is one that can.
    """

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    by_tma: bool = False


def launch_rule(m: int, n: int, *, gated: bool) -> TileRule:
    """Choose the tiles, for about 132 multiprocessors.

    Found by changing one product at a time in the layers of an 8B and a 1B at 4, 8, 16, 32 and 64 rows, on a GPU at its
    power limit.
    """
    few = m <= 16
    by_tma = m > 32  # the layers of an 8B: 5.25 instead of 5.32 ms at 64 rows, the same at 32, 4.18 for 4.15 at 16
    if gated:
        return TileRule(64, 128, 1, 4, 4, by_tma)
    if n >= 16384:  # for many rows wide tiles, so that x is read less often
        return TileRule(64 if few else 128, 128, 1, 4, 4, by_tma)
    num_tiles = triton.cdiv(n, 64)
    split_k = 4 if num_tiles <= 32 else 2 if num_tiles <= 64 else 1  # about a program per multiprocessor
    return TileRule(64, 128, split_k, 4, 6 if few else 5, by_tma)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    rule: TileRule,
    *,
    bias: torch.Tensor | None = None,
    scaling: Scaling | None = None,
    add_norm: _AddNorm | None = None,
) -> None:
    (m, k), n, gated = x.shape, out.shape[1], is_gated(weight)
    partial = torch.empty(rule.split_k if rule.split_k > 1 else 0, m, n, dtype=torch.float32, device=x.device)
    residual, gain, written_sums = add_norm or (x, x, partial)  # in the place of what is not read
    read_sums, eps = (partial, 0.0) if scaling is None else (scaling.square_sums, scaling.eps)
    block_m = max(triton.next_power_of_2(m), 16)  # the narrowest of the wide matrix instructions in use
    block_k = rule.block_k * 2 // x.itemsize
    even_k = k % (block_k * rule.split_k) == 0
    # Gate and up of a feature are one row to the accelerator: past k a tile of gate holds some of up, where x is zero.
    by_tma = rule.by_tma and has_tma(x.device) and fits_tma(x) and fits_tma(weight)
    _skinny_gemm_kernel[(triton.cdiv(n, rule.block_n) * rule.split_k,)](
        x,
        weight,
        TensorDescriptor.from_tensor(x, [block_m, block_k]) if by_tma else x,
        TensorDescriptor.from_tensor(weight.flatten(1), [rule.block_n, block_k]) if by_tma else weight,
        weight if bias is None else bias,
        read_sums,
        residual,
        gain,
        written_sums,
        out,
        partial,
        _arrivals(x.device),
        eps,
        len(read_sums),
        m,
        n,
        k,
        x.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=rule.block_n,
        BLOCK_K=block_k,
        SPLIT_K=rule.split_k,
        EVEN_K=even_k,
        BY_TMA=by_tma,
        GATED=gated,
        BIAS=bias is not None,
        SCALE=scaling is not None,
        MAX_PARTS=1 if scaling is None else triton.next_power_of_2(len(read_sums)),
        ADD_NORM=add_norm is not None,
        num_warps=rule.num_warps,
        num_stages=rule.num_stages,
        **dependent_launch(x),
    )


MAX_TILES = 1 << 16  # far more than a product that is cut along k has


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Make the counters of parts that are done; zeros between launches, so launches on one stream share them."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["m"])
def _skinny_gemm_kernel(
    x,
    weight,
    x_tiles,
    weight_tiles,
    bias,
    read_sums,
    residual,
    gain,
    written_sums,
    out,
    partial,
    arrivals,
    eps,
    num_parts,
    m,
    n,
    k,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    BY_TMA: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    ADD_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0) // SPLIT_K
    part = tl.program_id(0) % SPLIT_K
    part_len = tl.cdiv(k, BLOCK_K * SPLIT_K) * BLOCK_K
    first = part * part_len
    row = tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x + row[:, None] * x_stride + inner
    # Past the last feature there is something else, that one again or what the accelerator gives: no mask.
    weight_rows = weight + tl.minimum(column, n - 1).to(tl.int64)[:, None] * (2 * k if GATED else k)
    weight_ptrs = weight_rows + inner
    up_ptrs = weight_ptrs + k
    offset = row[None, :] * n + column[:, None]
    inside = (row < m)[None, :] & (column < n)[:, None]
    if ADD_NORM:
        wide_gain = tl.load(gain + column, mask=column < n, other=0).to(tl.float32)
    # 4 lines of 128 bytes of each row save 1 to 2 % of the layers of an 8B and a 1B; 8 save less, and to load a tile of
    # the weight slows the kernel before by more than it spares this one.
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    ahead = tl.minimum(first + tl.arange(0, 4) * LINE, k - 1)[None, :]
    prefetch(weight_rows + ahead, PDL)
    if GATED:
        prefetch(weight_rows + k + ahead, PDL)
    wait_for_previous(PDL)
    # what the end needs is on its way while the weight is read
    if ADD_NORM:
        before = tl.load(residual + offset, mask=inside, other=0)
    if SCALE:
        norm_part = tl.arange(0, MAX_PARTS)[:, None]
        there = (norm_part < num_parts) & (row < m)[None, :]
        squares = tl.load(read_sums + norm_part * m + row[None, :], mask=there, other=0)
    # the weight is the left operand: its rows fill the wide matrix instructions, those of x would leave them idle
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(first, tl.minimum(first + part_len, k), BLOCK_K):
        x_tile = x_tiles.load([0, start]) if BY_TMA else _load_x(x_ptrs, row, m, start, inner, k, EVEN_K)
        weight_tile = (
            weight_tiles.load([tile * BLOCK_N, start]) if BY_TMA else _load_weight(weight_ptrs, start, inner, k, EVEN_K)
        )
        total = dot(weight_tile, tl.trans(x_tile), total)
        if GATED:
            up_tile = (
                weight_tiles.load([tile * BLOCK_N, k + start])
                if BY_TMA
                else _load_weight(up_ptrs, start, inner, k, EVEN_K)
            )
            up_total = dot(up_tile, tl.trans(x_tile), up_total)
    finished = True
    if SPLIT_K > 1:
        tl.store(partial + part * m * n + offset, total, mask=inside)
        tl.debug_barrier()  # all threads' stores before the one thread's arrival
        finished = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if finished:
            tl.store(arrivals + tile, 0)
            total = tl.zeros(total.shape, tl.float32)
            for i in tl.static_range(SPLIT_K):
                # .cg: other multiprocessors wrote these, so the first-level cache is no place to look
                total += tl.load(partial + i * m * n + offset, mask=inside, other=0, cache_modifier=".cg")
    if finished:
        if SCALE:
            scale = tl.rsqrt(tl.sum(squares, 0) / k + eps)[None, :]
            total = total * scale
            if GATED:
                up_total = up_total * scale
        if BIAS:
            total += tl.load(bias + column, mask=column < n, other=0).to(tl.float32)[:, None]
        if GATED:
            total = total * tl.sigmoid(total) * up_total
        if ADD_NORM:
            summed = (total.to(before.dtype).to(tl.float32) + before.to(tl.float32)).to(before.dtype)
            tl.store(residual + offset, summed, mask=inside)
            wide = tl.where(inside, summed.to(tl.float32), 0)  # nothing from past the last feature
            tl.store(written_sums + tile * m + row, tl.sum(wide * wide, 0), mask=row < m)
            total = wide * wide_gain[:, None]
        tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _load_weight(ptrs, start, inner, k, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(ptrs + start)
    return tl.load(ptrs + start, mask=start + inner < k, other=0)


@triton.jit
def _load_x(ptrs, row, m, start, inner, k, EVEN_K: tl.constexpr):
    """Load a tile of x, zeros past its last row: to repeat that row instead would fetch it again and again."""
    mask = (row < m)[:, None]
    if not EVEN_K:
        mask = mask & (start + inner < k)
    return tl.load(ptrs + start, mask=mask, other=0)
