"""x · weightᵀ for few rows of x, where reading the weight is all the cost.

One row: a program multiplies one whole row of the weight, loaded before it waits for the kernel that makes x. More
rows: a program takes some rows of the weight and a part of k, streamed through the tensor cores; the last part to
arrive adds all of them in a fixed order. Products and sums in float32.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lightserve.kernels.dot import dot
from lightserve.kernels.launch import dependent_launch, wait_for_previous

MAX_ROWS = 64


def skinny_gemm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what ``skinny_gemm`` does, in plain torch."""
    product = torch.nn.functional.linear(x, weight, bias)
    return product if out is None else out.copy_(product)


def skinny_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply at most ``MAX_ROWS`` rows with a weight.

    Args:
        x: [m, k], any float dtype; rows may be strided, their elements not.
        weight: [n, k] contiguous, same dtype.
        bias: [n].
        out: [m, n] contiguous; made when not given.

    Raises:
        ValueError: The shapes do not fit, or ``x`` has too many rows.
    """
    (m, k), n = x.shape, weight.shape[0]
    if m > MAX_ROWS or weight.shape[1] != k or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"x {tuple(x.shape)} must have at most {MAX_ROWS} rows as wide as weight {tuple(weight.shape)}"
        )
    out = x.new_empty(m, n) if out is None else out
    if m == 1:
        _launch_whole_rows(x, weight, bias, out)
    elif m > 1:
        _launch_tiles(x, weight, bias, out, launch_rule(n))
    return out


def skinny_pays(m: int, n: int) -> bool:
    """Say whether ``skinny_gemm`` takes less time than the vendor's library for ``m`` rows and a weight of ``n``.

    Measured in a graph of an H200 at the shapes of Llama's 8B and 1B: see docs/performance.md.
    """
    return m <= MAX_ROWS and (m == 1 or m > 4 or n <= 4096 or n >= 65536)


@dataclass(frozen=True)
class TileRule:
    """How the weight is cut: tile, parts of k, warps, pipeline stages, whether the weight is the left operand."""

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    swap: bool


def launch_rule(n: int) -> TileRule:
    """Choose the tiles of more than one row, for about 132 multiprocessors.

    The weight is the left operand: its rows fill the wide matrix instructions, those of x would leave them idle (8B's
    gate_up at 16 rows: 58.5 µs, the other way round 61.1).
    """
    if n >= 16384:  # wide tiles, so that x is read less often
        return TileRule(block_n=128, block_k=128, split_k=1, num_warps=8, num_stages=3, swap=True)
    num_tiles = triton.cdiv(n, 64)
    split_k = 4 if num_tiles <= 32 else 2 if num_tiles <= 64 else 1  # about a program per multiprocessor
    return TileRule(block_n=64, block_k=128, split_k=split_k, num_warps=4, num_stages=5, swap=True)


def _launch_whole_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    (m, k), n = x.shape, weight.shape[0]
    block_k = triton.next_power_of_2(k)
    block_n = max(1, min(4096 // block_k, 16))  # at k = 2048 two rows, 17.8 µs for 1B's gate_up; one row 22.4
    _whole_rows_kernel[(triton.cdiv(n, block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        n,
        k,
        x.stride(0),
        M=m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BIAS=bias is not None,
        num_warps=4 if block_k < 4096 else 8,
        **dependent_launch(x),
    )


def _launch_tiles(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, rule: TileRule
) -> None:
    (m, k), n = x.shape, weight.shape[0]
    partial = torch.empty(rule.split_k if rule.split_k > 1 else 0, m, n, dtype=torch.float32, device=x.device)
    _tiles_kernel[(triton.cdiv(n, rule.block_n) * rule.split_k,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        partial,
        _arrivals(x.device),
        m,
        n,
        k,
        x.stride(0),
        BLOCK_M=max(triton.next_power_of_2(m), 16),  # tl.dot takes no fewer rows
        BLOCK_N=rule.block_n,
        BLOCK_K=rule.block_k,
        SPLIT_K=rule.split_k,
        SWAP=rule.swap,
        EVEN_K=k % (rule.block_k * rule.split_k) == 0,
        BIAS=bias is not None,
        num_warps=rule.num_warps,
        num_stages=rule.num_stages,
        **dependent_launch(x),
    )


MAX_TILES = 1 << 16


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Make the counters of parts that are done; zeros between launches, so launches on one stream share them."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@triton.jit
def _whole_rows_kernel(
    x,
    weight,
    bias,
    out,
    n,
    k,
    x_stride,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    line = weight + tl.minimum(column, n - 1).to(tl.int64)[:, None] * k
    w = tl.load(line + depth[None, :], mask=(depth < k)[None, :], other=0)
    wait_for_previous(PDL)
    for row in tl.static_range(M):
        values = tl.load(x + row * x_stride + depth, mask=depth < k, other=0)
        total = tl.sum(w.to(tl.float32) * values.to(tl.float32)[None, :], 1)
        if BIAS:
            total += tl.load(bias + column, mask=column < n, other=0).to(tl.float32)
        tl.store(out + row * n + column, total.to(out.dtype.element_ty), mask=column < n)


@triton.jit
def _tiles_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    arrivals,
    m,
    n,
    k,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0) // SPLIT_K
    part = tl.program_id(0) % SPLIT_K
    part_len = tl.cdiv(k, BLOCK_K * SPLIT_K) * BLOCK_K
    row = tl.arange(0, BLOCK_M)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)[None, :]
    # rows and columns past the end repeat the last one: no mask
    x_line = x + tl.minimum(row, m - 1)[:, None] * x_stride + inner
    weight_row = weight + tl.minimum(column, n - 1).to(tl.int64)[:, None] * k
    wait_for_previous(PDL)
    if SWAP:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(part * part_len, tl.minimum((part + 1) * part_len, k), BLOCK_K):
        if EVEN_K:
            x_tile = tl.load(x_line + start)
            weight_tile = tl.load(weight_row + inner + start)
        else:
            x_tile = tl.load(x_line + start, mask=start + inner < k, other=0)
            weight_tile = tl.load(weight_row + inner + start, mask=start + inner < k, other=0)
        if SWAP:
            total = dot(weight_tile, tl.trans(x_tile), total)
        else:
            total = dot(x_tile, tl.trans(weight_tile), total)
    if SWAP:
        place = row[None, :] * n + column[:, None]
        inside = (row < m)[None, :] & (column < n)[:, None]
    else:
        place = row[:, None] * n + column[None, :]
        inside = (row < m)[:, None] & (column < n)[None, :]
    finished = True
    if SPLIT_K > 1:
        tl.store(partial + part * m * n + place, total, mask=inside)
        tl.debug_barrier()  # all threads' stores before the one thread's arrival
        finished = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 1
        if finished:
            tl.store(arrivals + tile, 0)
            total = tl.zeros(total.shape, tl.float32)
            for i in tl.static_range(SPLIT_K):
                # .cg: other multiprocessors wrote these, so the first-level cache is no place to look
                total += tl.load(partial + i * m * n + place, mask=inside, other=0, cache_modifier=".cg")
    if finished:
        if BIAS:
            offset = tl.load(bias + column, mask=column < n, other=0).to(tl.float32)
            total += offset[:, None] if SWAP else offset[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
