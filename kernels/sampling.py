"""Choose one token per row: by its temperature, top-k, top-p and min-p, or the largest where the temperature is 0.

The uniform u of a draw comes from (seed, absolute position) alone, see ``uniform.py``; what the filters keep and on
which token u falls is told in ``draw.py``.

Two kernels: one program per row and tile takes maxima and masses; then one program per row draws.
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.checks import check_contiguous, check_rows
from lightserve.kernels.draw import draw, draw_reference
from lightserve.kernels.greedy import finite_or_zero, load_scores
from lightserve.kernels.launch import dependent_launch, num_multiprocessors, wait_for_previous
from lightserve.kernels.token_groups import mass_at
from lightserve.kernels.uniform import uniform, uniform_reference

GREEDY_BELOW = 1e-5  # a smaller temperature means argmax: the second best is then e^-1000 times as likely at best


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    vocab_size: int,
    scores: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``sample`` does, in plain torch."""
    raw = logits[:, :vocab_size].float()
    if raw.shape[0] == 0:
        return raw.new_empty(0, dtype=torch.int32), raw.new_empty(0)
    adjusted = raw if scores is None else scores[:, :vocab_size].float()
    best, token_ids = adjusted.max(dim=-1)
    drawn = (temperature >= GREEDY_BELOW).nonzero().squeeze(1)
    if drawn.numel():
        scaled = (adjusted[drawn] - best[drawn].unsqueeze(1)) / temperature[drawn].unsqueeze(1)
        u = uniform_reference(seeds[drawn], positions[drawn])
        token_ids[drawn] = draw_reference(scaled, top_k[drawn], top_p[drawn], min_p[drawn], u)
    logprobs = raw.gather(1, token_ids.unsqueeze(1)).squeeze(1) - raw.logsumexp(-1)
    broken = ~best.isfinite() | ~logprobs.isfinite()
    return token_ids.masked_fill(broken, -1).int(), logprobs.masked_fill(broken, 0)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    vocab_size: int,
    scores: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        logits: [n, at least vocab_size], any float dtype; rows may be strided, their elements not.
        temperature: [n] float32, contiguous, as are the next five; below ``GREEDY_BELOW`` the row is greedy.
        top_k: [n] int32, 0 = off.
        top_p: [n] float32, 1 = off.
        min_p: [n] float32, 0 = off.
        seeds: [n] int64, in [0, 2**63).
        positions: [n] int32, absolute position of the token to be sampled.
        vocab_size: Ids from here on have no text and are never chosen.
        scores: [n, at least vocab_size], rows contiguous, the logits after penalties and masks, to choose by;
            ``logits`` when not given.

    Returns:
        token_ids [n] int32, -1 where the row's logits are not finite; logprobs [n] float32 of the chosen ids under
        softmax(``logits``), 0 there.

    Raises:
        ValueError: A shape does not fit, or what must be contiguous is not.
    """
    scores = logits if scores is None else scores
    n, device = len(logits), logits.device
    check_rows(n, vocab_size, logits=logits, scores=scores)
    check_contiguous(
        (n,), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seeds, positions=positions
    )
    token_ids = torch.empty(n, dtype=torch.int32, device=device)
    logprobs = torch.empty(n, dtype=torch.float32, device=device)
    if n == 0:
        return token_ids, logprobs
    num_tiles = triton.cdiv(vocab_size, TILE)
    num_groups = num_tiles * (TILE // GROUP)
    tile_stats = torch.empty(n, 4, num_tiles, dtype=torch.float32, device=device)
    tile_best_ids = torch.empty(n, num_tiles, dtype=torch.int32, device=device)
    group_best = torch.empty(n, num_groups, dtype=torch.float32, device=device)
    distances = torch.empty(n, CANDIDATES, dtype=torch.float32, device=device)
    candidates = torch.empty(n, CANDIDATES, dtype=torch.int32, device=device)
    groups = torch.empty(n, num_groups, dtype=torch.int32, device=device)
    _sample_tile_kernel[(n, num_tiles)](
        logits,
        scores,
        temperature,
        tile_stats,
        tile_best_ids,
        group_best,
        logits.stride(0),
        scores.stride(0),
        vocab_size,
        num_tiles,
        GREEDY_BELOW=GREEDY_BELOW,
        TILE=TILE,
        GROUP=GROUP,
        num_warps=4,
        **dependent_launch(logits),
    )
    _sample_row_kernel[(n,)](
        logits,
        scores,
        tile_stats,
        tile_best_ids,
        group_best,
        distances,
        candidates,
        groups,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        token_ids,
        logprobs,
        logits.stride(0),
        scores.stride(0),
        vocab_size,
        num_tiles,
        num_groups,
        GREEDY_BELOW=GREEDY_BELOW,
        TILE=TILE,
        GROUP=GROUP,
        CANDIDATES=CANDIDATES,
        BLOCK_TILES=triton.next_power_of_2(num_tiles),
        BLOCK_GROUPS=triton.next_power_of_2(num_groups),
        num_warps=8,
        # two rows on a multiprocessor, once there are enough: a third slower alone, a fifth faster together
        maxnreg=128 if n > num_multiprocessors(device) else None,
        **dependent_launch(logits),
    )
    return token_ids, logprobs


TILE = 4096  # 32 tiles in a row of 128,256
GROUP = 128  # tokens under one maximum: about a thousand maxima bound any usual top-k
CANDIDATES = 4096  # small enough for registers


@triton.jit
def _sample_tile_kernel(
    logits,
    scores,
    temperature,
    tile_stats,
    tile_best_ids,
    group_best,
    logits_stride,
    scores_stride,
    vocab_size,
    num_tiles,
    GREEDY_BELOW: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token_id = tile * TILE + tl.arange(0, TILE)
    wait_for_previous(PDL)
    raw = load_scores(logits + row * logits_stride, token_id, vocab_size)
    score = load_scores(scores + row * scores_stride, token_id, vocab_size)
    raw_best = tl.max(raw)
    raw_mass = tl.sum(tl.exp(raw - finite_or_zero(raw_best)))
    best = tl.max(score)
    row_temperature = tl.load(temperature + row)
    row_temperature = tl.where(row_temperature >= GREEDY_BELOW, row_temperature, 1.0)
    mass = tl.sum(mass_at((finite_or_zero(best) - score) / row_temperature))
    best_of_groups = tl.max(tl.reshape(score, (TILE // GROUP, GROUP)), 1)
    group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    tl.store(group_best + row * num_tiles * (TILE // GROUP) + group, best_of_groups)
    has_nan = (raw_mass != raw_mass) | (mass != mass)
    stats = tile_stats + row * 4 * num_tiles + tile
    tl.store(stats, tl.where(has_nan, float("inf"), best))  # not finite either way: the row is broken
    tl.store(stats + num_tiles, raw_best)
    tl.store(stats + 2 * num_tiles, raw_mass)
    tl.store(stats + 3 * num_tiles, mass)
    tl.store(tile_best_ids + row * num_tiles + tile, tl.min(tl.where(score == best, token_id, vocab_size)))


@triton.jit
def _sample_row_kernel(
    logits,
    scores,
    tile_stats,
    tile_best_ids,
    group_best,
    distances,
    candidates,
    groups,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    token_ids,
    logprobs,
    logits_stride,
    scores_stride,
    vocab_size,
    num_tiles,
    num_groups,
    GREEDY_BELOW: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK_TILES)
    in_row = tile < num_tiles
    stats = tile_stats + row * 4 * num_tiles + tile
    wait_for_previous(PDL)
    tile_best = tl.load(stats, mask=in_row, other=float("-inf"))
    raw_tile_best = tl.load(stats + num_tiles, mask=in_row, other=float("-inf"))
    raw_tile_mass = tl.load(stats + 2 * num_tiles, mask=in_row, other=0)
    best = tl.max(tile_best)
    raw_best = tl.max(raw_tile_best)
    finite = (tl.abs(best) < float("inf")) & (tl.abs(raw_best) < float("inf"))
    best_ids = tl.load(tile_best_ids + row * num_tiles + tile, mask=in_row, other=0)
    token_id = tl.min(tl.where(tile_best == best, best_ids, vocab_size))
    row_temperature = tl.load(temperature + row)
    if finite & (row_temperature >= GREEDY_BELOW):
        tile_mass = tl.load(stats + 3 * num_tiles, mask=in_row, other=0) * mass_at((best - tile_best) / row_temperature)
        token_id = draw(
            scores + row * scores_stride,
            best,
            1 / row_temperature,
            vocab_size,
            tile_mass,
            stats + 3 * num_tiles,
            group_best + row * num_groups,
            num_groups,
            groups + row * num_groups,
            distances + row * CANDIDATES,
            candidates + row * CANDIDATES,
            tl.load(top_k + row),
            tl.load(top_p + row),
            tl.load(min_p + row),
            uniform(tl.load(seeds + row), tl.load(positions + row)),
            TILE,
            GROUP,
            CANDIDATES,
            BLOCK_GROUPS,
        )
    chosen = tl.load(logits + row * logits_stride + tl.where(finite, token_id, 0)).to(tl.float32)
    finite = finite & (chosen > float("-inf"))
    base = tl.where(finite, raw_best, 0.0)
    raw_mass = tl.sum(tl.where(finite, raw_tile_mass * tl.exp(raw_tile_best - base), 1.0))
    logprob = tl.where(finite, chosen, 0.0) - base - tl.log(raw_mass)
    tl.store(token_ids + row, tl.where(finite, token_id, -1))
    tl.store(logprobs + row, tl.where(finite, logprob, 0.0))
