"""Choose one token per row: temperature, top-k, top-p, min-p, then inverse CDF with one uniform number per row.

The uniform number is a counter-based hash of (seed, absolute position) alone: a request's draw depends neither on its
neighbours nor on its place in the batch. With s = (logit - max) / temperature, each filter keeps {s >= threshold}:

    top-k   the k-th largest s
    top-p   the largest threshold whose kept mass reaches top_p of what top-k kept
    min-p   log(min_p)

so ties at a threshold are all kept. The token is the first, in order of ids, at which the kept mass up to and including it
exceeds uniform · (all kept mass).
"""

import torch

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
