"""Choose each row's largest logit, and give its log-probability.

    token = argmax(logits)        logprob = -log Σ exp(logit - max)

Two kernels: one program per row and tile takes the maximum and the mass below it; then one program per row puts its
tiles together. Everything in float32.
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.checks import check_rows
from lightserve.kernels.launch import dependent_launch, wait_for_previous


def greedy_reference(logits: torch.Tensor, *, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``greedy`` does, in plain torch."""
    raw = logits[:, :vocab_size].float()
    best, token_ids = raw.max(dim=-1)
    logprobs = best - raw.logsumexp(-1)
    broken = ~best.isfinite()  # a NaN is the maximum of its row
    return token_ids.masked_fill(broken, -1).int(), logprobs.masked_fill(broken, 0)


def greedy(logits: torch.Tensor, *, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each row's largest logit, the lowest id among equals.

    Args:
        logits: [n, at least vocab_size], any float dtype; rows may be strided, their elements not.
        vocab_size: Ids from here on have no text and are never chosen.

    Returns:
        token_ids [n] int32, -1 where the row's logits are not finite; logprobs [n] float32, 0 there.

    Raises:
        ValueError: ``logits`` is too narrow, or its rows are not contiguous.
    """
    check_rows(len(logits), vocab_size, logits=logits)
    n, device = logits.shape[0], logits.device
    token_ids = torch.empty(n, dtype=torch.int32, device=device)
    logprobs = torch.empty(n, dtype=torch.float32, device=device)
    if n == 0:
        return token_ids, logprobs
    num_tiles = triton.cdiv(vocab_size, TILE)
    tile_stats = torch.empty(n, 2, num_tiles, dtype=torch.float32, device=device)
    tile_best_ids = torch.empty(n, num_tiles, dtype=torch.int32, device=device)
    _greedy_tile_kernel[(n, num_tiles)](
        logits,
        tile_stats,
        tile_best_ids,
        logits.stride(0),
        vocab_size,
        num_tiles,
        TILE=TILE,
        num_warps=4,
        **dependent_launch(logits),
    )
    _greedy_row_kernel[(n,)](
        tile_stats,
        tile_best_ids,
        token_ids,
        logprobs,
        vocab_size,
        num_tiles,
        BLOCK_TILES=triton.next_power_of_2(num_tiles),
        num_warps=1,
        **dependent_launch(logits),
    )
    return token_ids, logprobs


TILE = 4096  # 32 tiles in a row of 128,256


@triton.jit
def _greedy_tile_kernel(
    logits,
    tile_stats,
    tile_best_ids,
    logits_stride,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token_id = tile * TILE + tl.arange(0, TILE)
    wait_for_previous(PDL)
    score = load_scores(logits + row * logits_stride, token_id, vocab_size)
    best = tl.max(score)
    mass = tl.sum(tl.exp(score - finite_or_zero(best)))
    stats = tile_stats + row * 2 * num_tiles + tile
    tl.store(stats, tl.where(mass != mass, float("inf"), best))  # NaN: not finite either way, the row is broken
    tl.store(stats + num_tiles, mass)
    tl.store(tile_best_ids + row * num_tiles + tile, tl.min(tl.where(score == best, token_id, vocab_size)))


@triton.jit
def load_scores(row, token_id, vocab_size):
    """Load a row's values at ``token_id``, minus infinity from ``vocab_size`` on."""
    return tl.load(row + token_id, mask=token_id < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def finite_or_zero(value):
    """Give the value, or 0 where it is not finite."""
    return tl.where(tl.abs(value) < float("inf"), value, 0.0)


# The row kernel of sampling.py begins alike; with this beginning in a function, it takes up to 244 registers, not 212.
@triton.jit
def _greedy_row_kernel(
    tile_stats,
    tile_best_ids,
    token_ids,
    logprobs,
    vocab_size,
    num_tiles,
    BLOCK_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK_TILES)
    in_row = tile < num_tiles
    stats = tile_stats + row * 2 * num_tiles + tile
    wait_for_previous(PDL)
    tile_best = tl.load(stats, mask=in_row, other=float("-inf"))
    tile_mass = tl.load(stats + num_tiles, mask=in_row, other=0)
    best_ids = tl.load(tile_best_ids + row * num_tiles + tile, mask=in_row, other=0)
    best = tl.max(tile_best)
    finite = tl.abs(best) < float("inf")
    token_id = tl.min(tl.where(tile_best == best, best_ids, vocab_size))
    mass = tl.sum(tl.where(finite, tile_mass * tl.exp(tile_best - finite_or_zero(best)), 1.0))
    tl.store(token_ids + row, tl.where(finite, token_id, -1))
    tl.store(logprobs + row, tl.where(finite, 0.0 - tl.log(mass), 0.0))  # a certain one's is 0, not -0
