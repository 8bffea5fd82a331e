"""Penalties on the logits of tokens that a request has already seen.

    repetition (prompt and output): logit / r if positive, logit · r otherwise, once per id
    then presence (output):         logit - p, once per id
    and frequency (output):         logit - f · count

What a request has seen is one row of ``token_counts``: how often an id was generated, plus ``IN_PROMPT`` where the prompt
holds it.
"""

import torch

IN_PROMPT = 1 << 30


def count_tokens(token_counts: torch.Tensor, req_row: int, ids: torch.Tensor, prompt_len: int) -> None:
    """Start a request's row of ``token_counts`` anew from its ids.

    Args:
        token_counts: [num_rows, vocab_size] int32, one row is changed.
        req_row: Which.
        ids: [num_ids] int32 or int64: the prompt, and after a pause the output so far.
        prompt_len: ``ids[prompt_len:]`` were generated.
    """
    row = token_counts[req_row].zero_()
    row[ids[:prompt_len].long()] = IN_PROMPT
    generated = ids[prompt_len:].long()
    row.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))


def count_sampled(token_counts: torch.Tensor, req_rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Count one freshly sampled id per request; an id of -1 (a failed row) is not counted.

    Args:
        token_counts: [num_rows, vocab_size] int32, changed.
        req_rows: [n] int32, distinct except for padding rows.
        token_ids: [n] int32.
    """
    ones = (token_ids >= 0).to(torch.int32)
    token_counts.index_put_((req_rows.long(), token_ids.clamp_min(0).long()), ones, accumulate=True)


def penalties_reference(
    logits: torch.Tensor,
    token_counts: torch.Tensor,
    req_rows: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what ``penalties`` does, in plain torch."""
    seen = token_counts[req_rows.long(), : logits.shape[1]]
    generated = (seen & (IN_PROMPT - 1)).float()
    scores = logits.float()
    factor = repetition.unsqueeze(1)
    repeated = torch.where(scores > 0, scores / factor, scores * factor)
    scores = torch.where(seen != 0, repeated, scores)
    scores = scores - presence.unsqueeze(1) * (generated > 0) - frequency.unsqueeze(1) * generated
    return scores if out is None else out.copy_(scores)


def forbid_reference(scores: torch.Tensor, forbidden_ids: torch.Tensor) -> None:
    """Do what ``forbid`` does, in plain torch."""
    rows, columns = (forbidden_ids >= 0).nonzero(as_tuple=True)
    scores[rows, forbidden_ids[rows, columns].long()] = float("-inf")
