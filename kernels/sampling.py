"""Choose one token per row: temperature, top-k, top-p, min-p, then inverse CDF with one uniform number per row.

The uniform number is a counter-based hash of (seed, absolute position) alone: a request's draw depends neither on its
neighbours nor on its place in the batch. With s = (logit - max) / temperature, each filter keeps {s >= threshold}:

    top-k   the k-th largest s
    top-p   the largest threshold whose kept mass reaches top_p of what top-k kept
    min-p   log(min_p)

so ties at a threshold are all kept. The token is the first, in order of ids, at which the kept mass up to and including it
exceeds uniform · (all kept mass).

Two kernels: one program per row and tile takes maxima and the raw distribution's normaliser; then one program per row draws.
No sort: a threshold is the smallest distance d = -s whose weight (count, or mass) reaches a target. It is bracketed by
bisection over whole rows until few enough candidates lie inside the bracket, which are gathered and bisected bit by bit. The
k-th largest of the maxima of small groups is a first bracket that leaves little more than k candidates.
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.launch import dependent_launch, wait_for_previous

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
    num_groups = num_tiles * (TILE // GROUP)
    num_wide = triton.cdiv(vocab_size, WIDE)
    tile_stats = torch.empty(n, 4, num_tiles, dtype=torch.float32, device=device)
    tile_best_ids = torch.empty(n, num_tiles, dtype=torch.int32, device=device)
    group_best = torch.empty(n, num_groups if parameters else 0, dtype=torch.float32, device=device)
    scratch = torch.empty(n, CANDIDATES + num_wide if parameters else 0, dtype=torch.float32, device=device)
    _tile_kernel[(n, num_tiles)](
        logits,
        scores,
        tile_stats,
        tile_best_ids,
        group_best,
        logits.stride(0),
        scores.stride(0),
        vocab_size,
        num_tiles,
        SAMPLE=parameters is not None,
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
        scratch,
        *(parameters or (token_ids,) * 6),
        token_ids,
        logprobs,
        logits.stride(0),
        scores.stride(0),
        vocab_size,
        num_tiles,
        num_groups,
        num_wide,
        SAMPLE=parameters is not None,
        GREEDY_BELOW=GREEDY_BELOW,
        WIDE=WIDE,
        CANDIDATES=CANDIDATES,
        BLOCK_TILES=triton.next_power_of_2(num_tiles),
        BLOCK_GROUPS=triton.next_power_of_2(num_groups),
        BLOCK_WIDE=triton.next_power_of_2(num_wide),
        num_warps=ROW_WARPS if parameters else 1,
        **dependent_launch(logits),
    )
    return token_ids, logprobs


TILE = 4096  # of the first kernel: 32 programs per row of 128,256
GROUP = 128  # tokens under one maximum: about a thousand maxima bound any usual top-k
ROW_WARPS = 16
WIDE = 8192  # of the second kernel's passes: 16 tokens per thread in flight
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
    tile_stats,
    tile_best_ids,
    group_best,
    logits_stride,
    scores_stride,
    vocab_size,
    num_tiles,
    SAMPLE: tl.constexpr,
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
    raw_mass = tl.sum(tl.exp(raw - tl.where(tl.abs(raw_best) < float("inf"), raw_best, 0.0)))
    best, best_id = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    num_nan = tl.sum(((score != score) | (raw != raw)).to(tl.int32))
    stats = tile_stats + row * 4 * num_tiles + tile
    tl.store(stats, tl.where(num_nan > 0, float("inf"), best))  # not finite either way: the row is broken
    tl.store(stats + num_tiles, raw_best)
    tl.store(stats + 2 * num_tiles, raw_mass)
    tl.store(tile_best_ids + row * num_tiles + tile, tile * TILE + best_id)
    if SAMPLE:
        worst = tl.min(tl.where(score == float("-inf"), float("inf"), score))
        tl.store(stats + 3 * num_tiles, worst)
        best_of_groups = tl.max(tl.reshape(score, (TILE // GROUP, GROUP)), 1)
        group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        tl.store(group_best + row * num_tiles * (TILE // GROUP) + group, best_of_groups)


@triton.jit
def _row_kernel(
    logits,
    scores,
    tile_stats,
    tile_best_ids,
    group_best,
    scratch,
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
    num_wide,
    SAMPLE: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    WIDE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_WIDE: tl.constexpr,
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
            worst = tl.min(tl.load(stats + 3 * num_tiles, mask=in_row, other=float("inf")))
            source = scores + row * scores_stride
            candidates = scratch + row * (CANDIDATES + num_wide)
            limit = _limit(
                source,
                best,
                1 / warmth,
                (best - worst) / warmth,
                vocab_size,
                group_best + row * num_groups,
                num_groups,
                candidates,
                tl.load(top_k + row),
                tl.load(top_p + row),
                tl.load(min_p + row),
                WIDE,
                CANDIDATES,
                BLOCK_GROUPS,
            )
            draw = uniform(tl.load(seeds + row), tl.load(positions + row))
            token_id = _first_above(
                source, best, 1 / warmth, limit, draw, vocab_size, candidates + CANDIDATES, num_wide, WIDE, BLOCK_WIDE
            )
    chosen = tl.load(logits + row * logits_stride + tl.where(finite, token_id, 0)).to(tl.float32)
    finite = finite & (chosen > float("-inf"))
    base = tl.where(finite, raw_best, 0.0)
    raw_mass = tl.sum(tl.where(finite, raw_tile_mass * tl.exp(raw_tile_best - base), 1.0))
    tl.store(token_ids + row, tl.where(finite, token_id, -1))
    logprob = tl.where(finite, chosen, 0.0) - base - tl.log(raw_mass)
    tl.store(logprobs + row, tl.where(finite, logprob, 0.0))


@triton.jit
def _limit(
    source,
    best,
    inverse_temperature,
    widest,
    vocab_size,
    group_best,
    num_groups,
    candidates,
    k,
    p,
    smallest_p,
    WIDE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Find the largest distance from the best that top-k, top-p and min-p all keep."""
    limit = widest
    if (k > 0) & (k < vocab_size):
        upper = _kth_group(group_best, best, inverse_temperature, widest, num_groups, k, BLOCK_GROUPS)
        limit = _smallest_limit(
            source, best, inverse_temperature, upper, k.to(tl.float32), vocab_size, candidates, False, WIDE, CANDIDATES
        )
    if p < 1:
        _, mass = _weigh(source, best, inverse_temperature, limit, vocab_size, WIDE)
        # all tokens of less than (1 - p) · mass / vocab_size together weigh less than what may be left out
        upper = tl.minimum(limit, tl.log(vocab_size / ((1 - p) * mass)) + 0.001)
        limit = _smallest_limit(
            source, best, inverse_temperature, upper, p * mass, vocab_size, candidates, True, WIDE, CANDIDATES
        )
    if smallest_p > 0:
        limit = tl.minimum(limit, -tl.log(smallest_p))
    return limit


@triton.jit
def _distance(source, best, inverse_temperature, token_id, vocab_size):
    """How far below the best the tokens score; never negative, infinite outside the vocabulary."""
    score = tl.load(source + token_id, mask=token_id < vocab_size, other=float("-inf")).to(tl.float32)
    return (best - score) * inverse_temperature


@triton.jit
def _mass(distance):
    return tl.exp2(distance * -1.4426950408889634)


@triton.jit
def _weigh(source, best, inverse_temperature, limit, vocab_size, WIDE: tl.constexpr):
    """Count and weigh the tokens within ``limit``."""
    count = tl.zeros([WIDE], tl.int32)
    mass = tl.zeros([WIDE], tl.float32)
    for start in range(0, vocab_size, WIDE):
        distance = _distance(source, best, inverse_temperature, start + tl.arange(0, WIDE), vocab_size)
        kept = distance <= limit
        count += kept.to(tl.int32)
        mass += tl.where(kept, _mass(distance), 0.0)
    return tl.sum(count), tl.sum(mass)


@triton.jit
def _kth_group(group_best, best, inverse_temperature, widest, num_groups, k, BLOCK_GROUPS: tl.constexpr):
    """Bound the k-th smallest distance from above by the k-th smallest of the groups' smallest."""
    group = tl.arange(0, BLOCK_GROUPS)
    distance = _distance(group_best, best, inverse_temperature, group, num_groups)
    weight = (group < num_groups).to(tl.float32)
    nothing = tl.full([], -1, tl.int32)
    bound = _bisect(distance, weight, k.to(tl.float32), nothing, widest.to(tl.int32, bitcast=True))
    return tl.where(k <= num_groups, bound, widest)


@triton.jit
def _smallest_limit(
    source,
    best,
    inverse_temperature,
    upper,
    target,
    vocab_size,
    candidates,
    BY_MASS: tl.constexpr,
    WIDE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Find the smallest distance at which the weight within it reaches ``target``; ``upper`` when none does.

    The answer stays in (low, high]: the weight within low is too small, within high it is enough.
    """
    low = tl.full([], -1.0, tl.float32)
    count_low = 0
    weight_low = 0.0
    high = upper
    count_high, mass_high = _weigh(source, best, inverse_temperature, high, vocab_size, WIDE)
    middle = 0.5 * (low + high)
    while (count_high - count_low > CANDIDATES) & (low < middle) & (middle < high):
        count, mass = _weigh(source, best, inverse_temperature, middle, vocab_size, WIDE)
        weight = mass if BY_MASS else count.to(tl.float32)
        enough = weight >= target
        high = tl.where(enough, middle, high)
        count_high = tl.where(enough, count, count_high)
        low = tl.where(enough, low, middle)
        count_low = tl.where(enough, count_low, count)
        weight_low = tl.where(enough, weight_low, weight)
        middle = 0.5 * (low + high)
    if count_high - count_low <= CANDIDATES:  # else they are all equally far
        _gather(source, best, inverse_temperature, low, high, vocab_size, candidates, WIDE)
        index = tl.arange(0, CANDIDATES)
        found = index < count_high - count_low
        distance = tl.load(candidates + index, mask=found, other=float("inf"))
        weight = tl.where(found, _mass(distance) if BY_MASS else 1.0, 0.0)
        low_bits = tl.where(low < 0, -1, low.to(tl.int32, bitcast=True))
        high = _bisect(distance, weight, target - weight_low, low_bits, high.to(tl.int32, bitcast=True))
    return high


@triton.jit
def _gather(source, best, inverse_temperature, low, high, vocab_size, candidates, WIDE: tl.constexpr):
    """Write the distances in (low, high] side by side."""
    written = 0
    for start in range(0, vocab_size, WIDE):
        distance = _distance(source, best, inverse_temperature, start + tl.arange(0, WIDE), vocab_size)
        chosen = ((low < distance) & (distance <= high)).to(tl.int32)
        tl.store(candidates + written + tl.cumsum(chosen) - 1, distance, mask=chosen > 0)
        written += tl.sum(chosen)
    tl.debug_barrier()  # the program's other threads read them


@triton.jit
def _bisect(distance, weight, target, low_bits, high_bits):
    """Find the smallest of ``distance`` in (low, high] within which the weight reaches ``target``; high when none does.

    The bounds come as bits: floats from 0 up are ordered as their bits are. -1 lies below all of them.
    """
    bits = distance.to(tl.int32, bitcast=True)
    while high_bits - low_bits > 1:
        middle = low_bits + (high_bits - low_bits) // 2
        enough = tl.sum(tl.where(bits <= middle, weight, 0.0)) >= target
        high_bits = tl.where(enough, middle, high_bits)
        low_bits = tl.where(enough, low_bits, middle)
    return high_bits.to(tl.float32, bitcast=True)


@triton.jit
def _first_above(
    source,
    best,
    inverse_temperature,
    limit,
    draw,
    vocab_size,
    tile_mass,
    num_wide,
    WIDE: tl.constexpr,
    BLOCK_WIDE: tl.constexpr,
):
    """Walk the kept tokens in order of ids to the first at which their mass exceeds ``draw`` times all of it."""
    for tile in range(0, num_wide):
        distance = _distance(source, best, inverse_temperature, tile * WIDE + tl.arange(0, WIDE), vocab_size)
        tl.store(tile_mass + tile, tl.sum(tl.where(distance <= limit, _mass(distance), 0.0)))
    tl.debug_barrier()
    tiles = tl.arange(0, BLOCK_WIDE)
    mass = tl.load(tile_mass + tiles, mask=tiles < num_wide, other=0)
    cumulative = tl.cumsum(mass)
    target = draw * tl.sum(mass)
    last = tl.max(tl.where(mass > 0, tiles, 0))
    tile = tl.minimum(tl.min(tl.where((cumulative > target) & (mass > 0), tiles, BLOCK_WIDE)), last)
    before = tl.sum(tl.where(tiles < tile, mass, 0.0))
    token_id = tile * WIDE + tl.arange(0, WIDE)
    distance = _distance(source, best, inverse_temperature, token_id, vocab_size)
    mass_of_token = tl.where(distance <= limit, _mass(distance), 0.0)
    above = (before + tl.cumsum(mass_of_token) > target) & (mass_of_token > 0)
    first = tl.min(tl.where(above, token_id, vocab_size))
    return tl.where(first < vocab_size, first, tl.max(tl.where(mass_of_token > 0, token_id, 0)))
