"""Choose one token per row: temperature, top-k, top-p, min-p, then inverse CDF with one uniform number per row.

The uniform number is a counter-based hash of (seed, absolute position) alone: a request's draw depends neither on its
neighbours nor on its place in the batch. With s = (logit - max) / temperature, each filter keeps {s >= threshold}:

    top-k   the k-th largest s
    top-p   the largest threshold whose kept mass reaches top_p of what top-k kept
    min-p   log(min_p)

so ties at a threshold are all kept. The token is the first, in order of ids, at which the kept mass up to and including
it exceeds uniform · (all kept mass).

Two kernels: one program per row and tile takes maxima and masses; then one program per row draws. No sort: tokens that
may be kept are gathered by a bound on the distance d = -s (the k-th largest of the maxima of small groups, or the mass
that may be left out spread over all tokens), and the exact thresholds are found among them by bisecting the bits of d.
Should they be too many, as in a flat distribution, bisection over whole rows brackets each threshold first. Groups
whose best lies beyond the bound are passed over in either case.
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.launch import dependent_launch, num_multiprocessors, wait_for_previous

GREEDY_BELOW = 1e-5  # a smaller temperature means argmax: the second best is then e^-1000 times as likely at best

_GOLDEN = 0x9E3779B9
_MASK32 = 0xFFFFFFFF


def uniform_reference(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hash (seed, position) to a uniform float32 in [0, 1): three rounds of MurmurHash3's 32-bit finaliser.

    Args:
        seeds: [n] int64, in [0, 2**63).
        positions: [n] int32 or int64, absolute position of the token to be sampled.

    Returns:
        [n] float32, a multiple of 2**-24.
    """
    h = _mix_reference((seeds & _MASK32) ^ _GOLDEN)
    h = _mix_reference(h ^ (seeds >> 32))
    h = _mix_reference((h + positions.long() * _GOLDEN) & _MASK32)
    return (h >> 8).float() * 2**-24


def _mix_reference(h: torch.Tensor) -> torch.Tensor:
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _MASK32
    return h ^ (h >> 16)


def greedy_reference(logits: torch.Tensor, *, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what ``greedy`` does, in plain torch."""
    raw = logits[:, :vocab_size].float()
    best, token_ids = raw.max(dim=-1)
    logprobs = best - raw.logsumexp(-1)
    broken = ~best.isfinite()  # a NaN is the maximum of its row
    return token_ids.masked_fill(broken, -1).int(), logprobs.masked_fill(broken, 0)


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
        mass = kept_mass_reference(scaled, top_k[drawn], top_p[drawn], min_p[drawn])
        token_ids[drawn] = _first_above_reference(mass, uniform_reference(seeds[drawn], positions[drawn]))
    logprobs = raw.gather(1, token_ids.unsqueeze(1)).squeeze(1) - raw.logsumexp(-1)
    broken = ~best.isfinite() | ~logprobs.isfinite()
    return token_ids.masked_fill(broken, -1).int(), logprobs.masked_fill(broken, 0)


def kept_mass_reference(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Give each token's unnormalised probability after the three filters, 0 where it is left out.

    Args:
        scaled: [n, vocab_size] float32, (logit - max) / temperature.
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


def _first_above_reference(mass: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    cumulative = mass.cumsum(-1)
    target = uniform.unsqueeze(1) * cumulative[:, -1:]
    above = (cumulative > target) & (mass > 0)
    last_kept = mass.shape[1] - 1 - (mass > 0).flip(1).int().argmax(-1)
    return torch.where(above.any(-1), above.int().argmax(-1), last_kept)


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
    _check_rows(logits, vocab_size)
    return _choose(logits, logits, None, vocab_size)


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
        temperature: [n] float32; below ``GREEDY_BELOW`` the row is greedy.
        top_k: [n] int32, 0 = off.
        top_p: [n] float32, 1 = off.
        min_p: [n] float32, 0 = off.
        seeds: [n] int64, in [0, 2**63).
        positions: [n] int32, absolute position of the token to be sampled.
        vocab_size: Ids from here on have no text and are never chosen.
        scores: [n, at least vocab_size], the logits after penalties and masks, to choose by; ``logits`` when not given.

    Returns:
        token_ids [n] int32, -1 where the row's logits are not finite; logprobs [n] float32 of the chosen ids under
        softmax(``logits``), 0 there.

    Raises:
        ValueError: ``logits`` or ``scores`` is too narrow, or its rows are not contiguous.
    """
    scores = logits if scores is None else scores
    _check_rows(logits, vocab_size)
    _check_rows(scores, vocab_size)
    return _choose(logits, scores, (temperature, top_k, top_p, min_p, seeds, positions), vocab_size)


def _check_rows(logits: torch.Tensor, vocab_size: int) -> None:
    if logits.dim() != 2 or logits.shape[1] < vocab_size or logits.stride(1) != 1:
        raise ValueError(f"logits {tuple(logits.shape)} must have contiguous rows of at least {vocab_size}")


def _choose(
    logits: torch.Tensor, scores: torch.Tensor, parameters: tuple[torch.Tensor, ...] | None, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch both kernels; greedy without ``parameters``."""
    n, device = logits.shape[0], logits.device
    token_ids = torch.empty(n, dtype=torch.int32, device=device)
    logprobs = torch.empty(n, dtype=torch.float32, device=device)
    if n == 0:
        return token_ids, logprobs
    num_tiles = triton.cdiv(vocab_size, TILE)
    num_groups = num_tiles * (TILE // GROUP) if parameters else 0
    tile_stats = torch.empty(n, 4, num_tiles, dtype=torch.float32, device=device)
    tile_best_ids = torch.empty(n, num_tiles, dtype=torch.int32, device=device)
    group_best = torch.empty(n, num_groups, dtype=torch.float32, device=device)
    distances = torch.empty(n, CANDIDATES if parameters else 0, dtype=torch.float32, device=device)
    candidates = torch.empty(n, CANDIDATES if parameters else 0, dtype=torch.int32, device=device)
    groups = torch.empty(n, num_groups, dtype=torch.int32, device=device)
    temperature, *filters = parameters or (token_ids,) * 6
    _tile_kernel[(n, num_tiles)](
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
        SAMPLE=parameters is not None,
        GREEDY_BELOW=GREEDY_BELOW,
        TILE=TILE,
        GROUP=GROUP,
        num_warps=4,
        **dependent_launch(logits),
    )
    _row_kernel[(n,)](
        logits,
        scores,
        tile_stats,
        tile_best_ids,
        group_best,
        distances,
        candidates,
        groups,
        temperature,
        *filters,
        token_ids,
        logprobs,
        logits.stride(0),
        scores.stride(0),
        vocab_size,
        num_tiles,
        num_groups,
        SAMPLE=parameters is not None,
        GREEDY_BELOW=GREEDY_BELOW,
        TILE=TILE,
        GROUP=GROUP,
        CANDIDATES=CANDIDATES,
        BLOCK_TILES=triton.next_power_of_2(num_tiles),
        BLOCK_GROUPS=triton.next_power_of_2(num_groups),
        num_warps=8 if parameters else 1,
        # two rows on a multiprocessor, once there are enough: a third slower alone, a fifth faster together
        maxnreg=128 if parameters and n > num_multiprocessors(device) else None,
        **dependent_launch(logits),
    )
    return token_ids, logprobs


TILE = 4096  # 32 tiles in a row of 128,256
GROUP = 128  # tokens under one maximum: about a thousand maxima bound any usual top-k
CANDIDATES = 4096  # small enough for registers


@triton.jit
def uniform(seed, position):
    """Do what ``uniform_reference`` does, bit for bit."""
    h = _mix((seed & 0xFFFFFFFF).to(tl.uint32) ^ 0x9E3779B9)
    h = _mix(h ^ (seed >> 32).to(tl.uint32))
    h = _mix(h + position.to(tl.uint32) * 0x9E3779B9)
    return (h >> 8).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _mix(h):
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _tile_kernel(
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
    SAMPLE: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token_id = tile * TILE + tl.arange(0, TILE)
    inside = token_id < vocab_size
    wait_for_previous(PDL)
    raw = tl.load(logits + row * logits_stride + token_id, mask=inside, other=float("-inf")).to(tl.float32)
    score = tl.load(scores + row * scores_stride + token_id, mask=inside, other=float("-inf")).to(tl.float32)
    raw_best = tl.max(raw)
    raw_mass = tl.sum(tl.exp(raw - _finite(raw_best)))
    best = tl.max(score)
    stats = tile_stats + row * 4 * num_tiles + tile
    mass = raw_mass
    if SAMPLE:
        warmth = tl.load(temperature + row)
        warmth = tl.where(warmth >= GREEDY_BELOW, warmth, 1.0)
        mass = tl.sum(_mass((_finite(best) - score) / warmth))
        tl.store(stats + 3 * num_tiles, mass)
        best_of_groups = tl.max(tl.reshape(score, (TILE // GROUP, GROUP)), 1)
        group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        tl.store(group_best + row * num_tiles * (TILE // GROUP) + group, best_of_groups)
    has_nan = (raw_mass != raw_mass) | (mass != mass)
    tl.store(stats, tl.where(has_nan, float("inf"), best))  # not finite either way: the row is broken
    tl.store(stats + num_tiles, raw_best)
    tl.store(stats + 2 * num_tiles, raw_mass)
    tl.store(tile_best_ids + row * num_tiles + tile, tl.min(tl.where(score == best, token_id, vocab_size)))


@triton.jit
def _finite(value):
    return tl.where(tl.abs(value) < float("inf"), value, 0.0)


@triton.jit
def _mass(distance):
    return tl.exp2(distance * -1.4426950408889634)


@triton.jit
def _row_kernel(
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
    SAMPLE: tl.constexpr,
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
    if SAMPLE:
        warmth = tl.load(temperature + row)
        if finite & (warmth >= GREEDY_BELOW):
            tile_mass = tl.load(stats + 3 * num_tiles, mask=in_row, other=0) * _mass((best - tile_best) / warmth)
            token_id = _draw(
                scores + row * scores_stride,
                best,
                1 / warmth,
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


@triton.jit
def _draw(
    source,
    best,
    inverse_temperature,
    vocab_size,
    tile_mass,
    tile_mass_out,
    group_best,
    num_groups,
    groups,
    distances,
    candidates,
    k,
    p,
    smallest_p,
    draw,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Draw one token of a row: from all tokens, from the gathered candidates, or by passes over the row."""
    k = tl.where((k > 0) & (k < vocab_size), k, 0)
    mass = tl.sum(tile_mass)
    group = tl.arange(0, BLOCK_GROUPS)
    nearest = _distance(
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
    num_listed = _list_groups(nearest, upper, num_groups, groups)
    if (k == 0) & (p >= 1) & (smallest_p <= 0):
        token_id = _first_above(
            source, best, inverse_temperature, upper, draw, vocab_size, tile_mass, groups, num_listed, TILE, GROUP
        )
    else:
        count = _gather(
            source,
            best,
            inverse_temperature,
            -1.0,
            upper,
            vocab_size,
            groups,
            num_listed,
            distances,
            candidates,
            TILE,
            GROUP,
            CANDIDATES,
        )
        if count <= CANDIDATES:
            token_id = _draw_candidate(distances, candidates, count, upper, mass, k, p, beyond, draw, CANDIDATES)
        else:
            limit = upper
            if k > 0:
                limit = _smallest_limit(
                    source,
                    best,
                    inverse_temperature,
                    upper,
                    k.to(tl.float32),
                    vocab_size,
                    groups,
                    num_listed,
                    distances,
                    candidates,
                    False,
                    TILE,
                    GROUP,
                    CANDIDATES,
                )
                _, mass = _weigh(source, best, inverse_temperature, limit, vocab_size, groups, num_listed, TILE, GROUP)
            if p < 1:
                upper = tl.minimum(limit, tl.log(vocab_size / ((1 - p) * mass)) + 0.001)
                limit = _smallest_limit(
                    source,
                    best,
                    inverse_temperature,
                    upper,
                    p * mass,
                    vocab_size,
                    groups,
                    num_listed,
                    distances,
                    candidates,
                    True,
                    TILE,
                    GROUP,
                    CANDIDATES,
                )
            limit = tl.minimum(limit, beyond)
            kept_mass = _mass_of_tiles(
                source,
                best,
                inverse_temperature,
                limit,
                vocab_size,
                groups,
                num_listed,
                tile_mass_out,
                tile_mass.shape[0],
                TILE,
                GROUP,
            )
            token_id = _first_above(
                source, best, inverse_temperature, limit, draw, vocab_size, kept_mass, groups, num_listed, TILE, GROUP
            )
    return token_id


@triton.jit
def _draw_candidate(distances, candidates, count, upper, mass, k, p, beyond, draw, CANDIDATES: tl.constexpr):
    """Draw from all tokens that may be kept, held in registers."""
    index = tl.arange(0, CANDIDATES)
    distance = tl.load(distances + index, mask=index < count, other=float("inf"))
    limit = upper
    if k > 0:
        limit = _bisect(distance, (index < count).to(tl.float32), k.to(tl.float32), -1.0, limit)
        mass = tl.sum(tl.where(distance <= limit, _mass(distance), 0.0))
    if p < 1:
        limit = _bisect(distance, _mass(distance), p * mass, -1.0, limit)
    limit = tl.minimum(limit, beyond)
    kept = tl.where(distance <= limit, _mass(distance), 0.0)
    return tl.load(candidates + _index_above(kept, draw * tl.sum(kept)))


@triton.jit
def _index_above(mass, target):
    """Find the first index at which the running sum of ``mass`` exceeds ``target``, the last with mass if none does."""
    index = tl.arange(0, mass.shape[0])
    above = (tl.cumsum(mass) > target) & (mass > 0)
    last = tl.max(tl.where(mass > 0, index, 0))
    return tl.minimum(tl.min(tl.where(above, index, mass.shape[0])), last)


@triton.jit
def _distance(score, best, inverse_temperature):
    """How far below the best tokens score; never negative."""
    return (best - score) * inverse_temperature


@triton.jit
def _list_groups(nearest, upper, num_groups, groups):
    """Write the groups that hold a token within ``upper`` side by side; count them."""
    group = tl.arange(0, nearest.shape[0])
    listed = ((nearest <= upper) & (group < num_groups)).to(tl.int32)
    tl.store(groups + tl.cumsum(listed) - 1, group, mask=listed > 0)
    tl.debug_barrier()  # the program's other threads read them
    return tl.sum(listed)


@triton.jit
def _load_tile(
    source,
    best,
    inverse_temperature,
    tile,
    vocab_size,
    groups,
    num_listed,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Load a tile of the listed groups: the tokens' distances, infinite where there is none, and ids."""
    place = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    group = tl.load(groups + place, mask=place < num_listed, other=0)
    token_id = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # in two dimensions: the loads stay wide
    exists = (place < num_listed)[:, None] & (token_id < vocab_size)
    score = tl.load(source + token_id, mask=exists, other=float("-inf")).to(tl.float32)
    distance = _distance(score, best, inverse_temperature)
    return tl.reshape(distance, (TILE,)), tl.reshape(token_id, (TILE,))


@triton.jit
def _first_above(
    source,
    best,
    inverse_temperature,
    limit,
    draw,
    vocab_size,
    tile_mass,
    groups,
    num_listed,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Find the token at which the mass within ``limit``, in order of ids, exceeds ``draw`` times all of it."""
    target = draw * tl.sum(tile_mass)
    tile = _index_above(tile_mass, target)
    before = tl.sum(tl.where(tl.arange(0, tile_mass.shape[0]) < tile, tile_mass, 0.0))
    distance, token_id = _load_tile(
        source, best, inverse_temperature, tile, vocab_size, groups, num_listed, TILE, GROUP
    )
    index = _index_above(tl.where(distance <= limit, _mass(distance), 0.0), target - before)
    return tl.sum(tl.where(tl.arange(0, TILE) == index, token_id, 0))


@triton.jit
def _gather(
    source,
    best,
    inverse_temperature,
    low,
    high,
    vocab_size,
    groups,
    num_listed,
    distances,
    candidates,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Write the tokens whose distances lie in (low, high] side by side; count them, but stop when no more fit."""
    count = 0
    tile = 0
    while (tile * (TILE // GROUP) < num_listed) & (count <= CANDIDATES):
        distance, token_id = _load_tile(
            source, best, inverse_temperature, tile, vocab_size, groups, num_listed, TILE, GROUP
        )
        chosen = ((low < distance) & (distance <= high) & (distance < float("inf"))).to(tl.int32)
        place = count + tl.cumsum(chosen) - 1
        fits = (chosen > 0) & (place < CANDIDATES)
        tl.store(distances + place, distance, mask=fits)
        tl.store(candidates + place, token_id, mask=fits)
        count += tl.sum(chosen)
        tile += 1
    tl.debug_barrier()  # the program's other threads read them
    return count


@triton.jit
def _weigh(
    source,
    best,
    inverse_temperature,
    limit,
    vocab_size,
    groups,
    num_listed,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Count and weigh the tokens within ``limit``."""
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.float32)
    for tile in tl.range(0, tl.cdiv(num_listed, TILE // GROUP), num_stages=3):
        distance, _ = _load_tile(source, best, inverse_temperature, tile, vocab_size, groups, num_listed, TILE, GROUP)
        kept = (distance <= limit) & (distance < float("inf"))
        count += kept.to(tl.int32)
        mass += tl.where(kept, _mass(distance), 0.0)
    return tl.sum(count), tl.sum(mass)


@triton.jit
def _mass_of_tiles(
    source,
    best,
    inverse_temperature,
    limit,
    vocab_size,
    groups,
    num_listed,
    tile_mass,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Weigh the tokens within ``limit`` tile by tile; ``tile_mass`` points to room for [BLOCK_TILES] masses."""
    num_tiles = tl.cdiv(num_listed, TILE // GROUP)
    index = tl.arange(0, BLOCK_TILES)
    for tile in tl.range(0, num_tiles, num_stages=3):
        distance, _ = _load_tile(source, best, inverse_temperature, tile, vocab_size, groups, num_listed, TILE, GROUP)
        mass = tl.sum(tl.where(distance <= limit, _mass(distance), 0.0))
        tl.store(tile_mass, mass, mask=index == tile)
    tl.debug_barrier()
    return tl.load(tile_mass, mask=index < num_tiles, other=0)


@triton.jit
def _smallest_limit(
    source,
    best,
    inverse_temperature,
    upper,
    target,
    vocab_size,
    groups,
    num_listed,
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
    count_high, _ = _weigh(source, best, inverse_temperature, high, vocab_size, groups, num_listed, TILE, GROUP)
    middle = 0.5 * (low + high)
    while (count_high - count_low > CANDIDATES) & (low < middle) & (middle < high):
        count, mass = _weigh(source, best, inverse_temperature, middle, vocab_size, groups, num_listed, TILE, GROUP)
        weight = mass if BY_MASS else count.to(tl.float32)
        enough = weight >= target
        high = tl.where(enough, middle, high)
        count_high = tl.where(enough, count, count_high)
        low = tl.where(enough, low, middle)
        count_low = tl.where(enough, count_low, count)
        weight_low = tl.where(enough, weight_low, weight)
        middle = 0.5 * (low + high)
    if count_high - count_low <= CANDIDATES:  # else they are all equally far
        count = _gather(
            source,
            best,
            inverse_temperature,
            low,
            high,
            vocab_size,
            groups,
            num_listed,
            distances,
            candidates,
            TILE,
            GROUP,
            CANDIDATES,
        )
        index = tl.arange(0, CANDIDATES)
        distance = tl.load(distances + index, mask=index < count, other=float("inf"))
        weight = _mass(distance) if BY_MASS else (index < count).to(tl.float32)
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
