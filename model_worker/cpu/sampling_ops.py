"""Sampling on a CPU, in few passes over the vocabulary and without sorting it.

Functions take and give what those of the same names in ``kernels/greedy.py``, ``kernels/sampling.py`` and
``kernels/penalties.py`` do.
"""

import math

import torch

from lightserve.kernels.penalties import penalties_reference
from lightserve.kernels.sampling import GREEDY_BELOW
from lightserve.kernels.uniform import uniform_reference

# Rows are taken so many at a time: what is made of them stays in the cache and needs no fresh pages. The log-softmax of
# 64 rows of 49,152 bfloat16 takes 15 ms of one core at once, 3 ms so.
_ROWS_AT_ONCE = 8


def greedy(logits: torch.Tensor, *, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the greatest logit of each row."""
    return _join([_greedy(raw) for raw in torch.split(logits[:, :vocab_size], _ROWS_AT_ONCE)])


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
    """Draw one id of each row."""
    raw = logits[:, :vocab_size]
    adjusted = raw if scores is None else scores[:, :vocab_size]
    uniform = uniform_reference(seeds, positions)
    per_row = (raw, adjusted, temperature, top_k, top_p, min_p, uniform)
    blocks = zip(*(torch.split(values, _ROWS_AT_ONCE) for values in per_row), strict=True)
    return _join([_sample(*block) for block in blocks])


def penalties(
    logits: torch.Tensor,
    token_counts: torch.Tensor,
    req_rows: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Lower the logits of ids that a request has seen."""
    scores = torch.empty(logits.shape)
    per_row = (logits, req_rows, repetition, presence, frequency, scores)
    for raw, rows, *amounts, out in zip(*(torch.split(values, _ROWS_AT_ONCE) for values in per_row), strict=True):
        penalties_reference(raw, token_counts, rows, *amounts, out=out)
    return scores


def _join(blocks: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids, logprobs = zip(*blocks, strict=True)
    return torch.cat(token_ids), torch.cat(logprobs)


def _greedy(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    best, token_ids = raw.max(dim=-1)
    return _with_logprobs(raw, best, token_ids)


def _sample(
    raw: torch.Tensor,
    adjusted: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    best, token_ids = adjusted.max(dim=-1)
    drawn = ((temperature >= GREEDY_BELOW) & best.isfinite()).nonzero().squeeze(1)
    if len(drawn):
        scaled = adjusted[drawn].float().sub_(best[drawn].float().unsqueeze(1))
        scaled.div_(temperature[drawn].unsqueeze(1))
        thresholds = _thresholds(scaled, top_k[drawn], top_p[drawn], min_p[drawn])
        token_ids[drawn] = _draw(scaled, thresholds, uniform[drawn])
    return _with_logprobs(raw, best, token_ids)


def _with_logprobs(raw: torch.Tensor, best: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the chosen ids' log-probabilities; -1 and 0 where the row was not finite (its maximum then is not either)."""
    logprobs = raw.log_softmax(-1, dtype=torch.float32).gather(1, token_ids.unsqueeze(1)).squeeze(1)
    broken = ~best.isfinite() | ~logprobs.isfinite()
    return token_ids.masked_fill(broken, -1).int(), logprobs.masked_fill(broken, 0)


def _thresholds(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """[n], the least scaled logit that each row's filters keep; -inf where none is on."""
    thresholds = min_p.log()
    filtered = ((top_k > 0) | (top_p < 1)).nonzero().squeeze(1).tolist()
    for row in filtered:
        threshold = _top_k_top_p_threshold(scaled[row], int(top_k[row]), float(top_p[row]))
        thresholds[row] = max(thresholds[row], threshold)
    return thresholds


def _top_k_top_p_threshold(scaled: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The least scaled logit that one row's top-k and top-p keep; sorts only tokens that may be kept."""
    vocab_size = len(scaled)
    if 0 < top_k < vocab_size:
        kth = scaled.topk(top_k).values[-1]
        candidates = scaled[scaled >= kth]
        total = candidates.exp().sum()
    else:
        total = scaled.exp().sum()
        # All tokens below (1 - top_p) / vocab_size of the mass together hold less than 1 - top_p of it. Half of that,
        # so that no rounding matters.
        candidates = scaled[scaled >= (total * ((1 - top_p) / vocab_size / 2)).log()]
    ordered = candidates.sort(descending=True).values
    if top_p >= 1:
        return ordered[-1]
    mass = ordered.exp()
    mass_before = mass.cumsum(0) - mass
    num_kept = int((mass_before < top_p * total).sum())
    return ordered[max(num_kept, 1) - 1]


def _draw(scaled: torch.Tensor, thresholds: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[n] int64: the first id at which the kept mass exceeds its share ``uniform`` of all kept mass."""
    mass = scaled.exp()
    if float(thresholds.max()) > -math.inf:
        mass.masked_fill_(scaled < thresholds.unsqueeze(1), 0)
    cumulative = mass.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    chosen = torch.searchsorted(cumulative, uniform.unsqueeze(1) * total, right=True)
    # A uniform number next to 1 may round to all of the mass: then it is the last id that has any.
    last_kept = torch.searchsorted(cumulative, total)
    return torch.minimum(chosen, last_kept).squeeze(1)
