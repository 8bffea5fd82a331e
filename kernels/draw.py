"""Draw one token of a row: what three filters keep of its distribution, then inverse CDF with a uniform u in [0, 1).

With s = (score - max) / temperature, each filter keeps {s >= threshold}:

    top-k   the k-th largest s
    top-p   the largest threshold whose kept mass reaches top_p of what top-k kept
    min-p   log(min_p)

so ties at a threshold are all kept. The token is the first, in order of ids, at which the kept mass up to and including
it exceeds u · (all kept mass).

No sort: tokens that may be kept are gathered by a bound on the distance d = -s (the k-th largest of the maxima of small
groups, or the mass that may be left out spread over all tokens), and the exact thresholds are found among them by
bisecting the bits of d. Should they be too many, as in a flat distribution, bisection over whole rows brackets each
threshold first. Groups whose best lies beyond the bound are passed over in either case.
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.token_groups import (
    Row,
    distance_of,
    first_above,
    gather,
    index_above,
    list_groups,
    mass_at,
    mass_of_tiles,
    weigh,
)


def draw_reference(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """Do what ``draw`` does, in plain torch, for many rows.

    Args:
        scaled: As for ``kept_mass_reference``, and so are the filters.
        top_k: [n] int32.
        top_p: [n] float32.
        min_p: [n] float32.
        u: [n] float32, in [0, 1).

    Returns:
        [n] int64.
    """
    mass = kept_mass_reference(scaled, top_k, top_p, min_p)
    cumulative = mass.cumsum(-1)
    target = u.unsqueeze(1) * cumulative[:, -1:]
    above = (cumulative > target) & (mass > 0)
    last_kept = mass.shape[1] - 1 - (mass > 0).flip(1).int().argmax(-1)
    return torch.where(above.any(-1), above.int().argmax(-1), last_kept)


def kept_mass_reference(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Give each token's unnormalised probability after the three filters, 0 where it is left out.

    Args:
        scaled: [n, vocab_size] float32, (score - max) / temperature.
        top_k: [n] int32, 0 = off.
        top_p: [n] float32, 1 = off.
        min_p: [n] float32, 0 = off.
    """
    mass = scaled.exp()
    mass = mass.masked_fill(scaled < min_p.log().unsqueeze(1), 0)
    if bool(((top_k > 0) | (top_p < 1)).any()):
        threshold = _top_k_top_p_threshold_reference(scaled, top_k, top_p)
        mass = mass.masked_fill(scaled < threshold.unsqueeze(1), 0)
    return mass


def _top_k_top_p_threshold_reference(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    vocab_size = scaled.shape[1]
    ordered = scaled.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size).long() - 1
    kth = ordered.gather(1, last.unsqueeze(1))  # [n, 1]
    mass = ordered.exp().masked_fill(ordered < kth, 0)
    before = mass.cumsum(-1) - mass  # what is kept before each token, in descending order
    reached = (before >= top_p.unsqueeze(1) * mass.sum(-1, keepdim=True)) & (top_p < 1).unsqueeze(1)
    num_kept = (~reached & (ordered >= kth)).sum(-1, keepdim=True).clamp_min(1)
    return ordered.gather(1, num_kept - 1).squeeze(1)


@triton.jit
def draw(
    scores,
    best,
    inverse_temperature,
    vocab_size,
    tile_mass,
    tile_mass_ptr,
    group_best,
    num_groups,
    groups,
    distances,
    candidates,
    k,
    p,
    smallest_p,
    u,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Draw one token of a row: from all tokens, from the gathered candidates, or by passes over the row."""
    k = tl.where((k > 0) & (k < vocab_size), k, 0)
    mass = tl.sum(tile_mass)
    group = tl.arange(0, BLOCK_GROUPS)
    nearest = distance_of(
        tl.load(group_best + group, mask=group < num_groups, other=float("-inf")), best, inverse_temperature
    )
    upper = tl.full([], float("inf"), tl.float32)
    beyond = tl.where(smallest_p > 0, -tl.log(tl.maximum(smallest_p, 1e-30)), float("inf"))
    if k > 0:  # no more than k groups hold a token nearer than the k-th nearest
        upper = _bisect(nearest, (group < num_groups).to(tl.float32), k.to(tl.float32), -1.0, float("inf"))
    if p < 1:  # all tokens below (1 - p) · mass / vocab_size weigh less than may be left out; the best alone weighs 1
        upper = tl.minimum(upper, tl.log(vocab_size / ((1 - p) * tl.where(k > 0, 1.0, mass))) + 0.001)
    if (k == 0) & (p >= 1):
        upper = beyond
    num_listed = list_groups(nearest, upper, num_groups, groups)
    row = Row(scores, best, inverse_temperature, vocab_size, groups, num_listed)
    if (k == 0) & (p >= 1) & (smallest_p <= 0):
        token_id = first_above(row, upper, u, tile_mass, TILE, GROUP)
    else:
        count = gather(row, -1.0, upper, distances, candidates, TILE, GROUP, CANDIDATES)
        if count <= CANDIDATES:
            token_id = _draw_candidate(distances, candidates, count, upper, mass, k, p, beyond, u, CANDIDATES)
        else:
            limit = upper
            if k > 0:
                limit = _smallest_limit(
                    row, upper, k.to(tl.float32), distances, candidates, False, TILE, GROUP, CANDIDATES
                )
                _, mass = weigh(row, limit, TILE, GROUP)
            if p < 1:
                upper = tl.minimum(limit, tl.log(vocab_size / ((1 - p) * mass)) + 0.001)
                limit = _smallest_limit(row, upper, p * mass, distances, candidates, True, TILE, GROUP, CANDIDATES)
            limit = tl.minimum(limit, beyond)
            kept_mass = mass_of_tiles(row, limit, tile_mass_ptr, tile_mass.shape[0], TILE, GROUP)
            token_id = first_above(row, limit, u, kept_mass, TILE, GROUP)
    return token_id


@triton.jit
def _draw_candidate(distances, candidates, count, upper, mass, k, p, beyond, u, CANDIDATES: tl.constexpr):
    """Draw from all tokens that may be kept, held in registers."""
    index = tl.arange(0, CANDIDATES)
    distance = tl.load(distances + index, mask=index < count, other=float("inf"))
    limit = upper
    if k > 0:
        limit = _bisect(distance, (index < count).to(tl.float32), k.to(tl.float32), -1.0, limit)
        mass = tl.sum(tl.where(distance <= limit, mass_at(distance), 0.0))
    if p < 1:
        limit = _bisect(distance, mass_at(distance), p * mass, -1.0, limit)
    limit = tl.minimum(limit, beyond)
    kept = tl.where(distance <= limit, mass_at(distance), 0.0)
    return tl.load(candidates + index_above(kept, u * tl.sum(kept)))


@triton.jit
def _smallest_limit(
    row,
    upper,
    target,
    distances,
    candidates,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Find the smallest distance at which the weight within it reaches ``target``; ``upper`` when none does.

    The answer stays in (low, high]: the weight within low is too small, within high it is enough.
    """
    low = tl.full([], -1.0, tl.float32)
    count_low = 0
    weight_low = 0.0
    # an infinite upper bound cannot be halved; float32 distances beyond 1e30 belong to logits nobody keeps
    high = tl.minimum(upper, 1e30)
    count_high, _ = weigh(row, high, TILE, GROUP)
    middle = 0.5 * (low + high)
    while (count_high - count_low > CANDIDATES) & (low < middle) & (middle < high):
        count, mass = weigh(row, middle, TILE, GROUP)
        weight = mass if BY_MASS else count.to(tl.float32)
        enough = weight >= target
        high = tl.where(enough, middle, high)
        count_high = tl.where(enough, count, count_high)
        low = tl.where(enough, low, middle)
        count_low = tl.where(enough, count_low, count)
        weight_low = tl.where(enough, weight_low, weight)
        middle = 0.5 * (low + high)
    if count_high - count_low <= CANDIDATES:  # else they are all equally far
        count = gather(row, low, high, distances, candidates, TILE, GROUP, CANDIDATES)
        index = tl.arange(0, CANDIDATES)
        distance = tl.load(distances + index, mask=index < count, other=float("inf"))
        weight = mass_at(distance) if BY_MASS else (index < count).to(tl.float32)
        high = _bisect(distance, weight, target - weight_low, low, high)
    return high


@triton.jit
def _bisect(distance, weight, target, low, high):
    """Find the smallest of ``distance`` in (low, high] within which the weight reaches ``target``; high when none does.

    Floats from 0 up are ordered as their bits are; ``low`` may also be -1, below all of them.
    """
    bits = distance.to(tl.int32, bitcast=True)
    low_bits = tl.where(low < 0, -1, (low + tl.zeros([], tl.float32)).to(tl.int32, bitcast=True))
    high_bits = (high + tl.zeros([], tl.float32)).to(tl.int32, bitcast=True)
    while high_bits - low_bits > 1:
        middle = low_bits + (high_bits - low_bits) // 2
        enough = tl.sum(tl.where(bits <= middle, weight, 0.0)) >= target
        high_bits = tl.where(enough, middle, high_bits)
        low_bits = tl.where(enough, low_bits, middle)
    return high_bits.to(tl.float32, bitcast=True)
