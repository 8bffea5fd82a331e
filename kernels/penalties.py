"""Penalties on the logits of tokens that a request has already seen.

    repetition (prompt and output): logit / r if positive, logit · r otherwise, once per id
    then presence (output):         logit - p, once per id
    and frequency (output):         logit - f · count

What a request has seen is one row of ``token_counts``: how often an id was generated, plus ``IN_PROMPT`` where the
prompt holds it.
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.checks import check_contiguous, check_rows
from lightserve.kernels.launch import dependent_launch, wait_for_previous

IN_PROMPT = 1 << 30
_COUNT_MASK = tl.constexpr(IN_PROMPT - 1)  # all bits below


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
    generated = (seen & _COUNT_MASK.value).float()
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


def penalties(
    logits: torch.Tensor,
    token_counts: torch.Tensor,
    req_rows: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Copy the logits, penalising what each request has already seen.

    Args:
        logits: [n, vocab_size] any float dtype; rows may be strided, their elements not. Left as they are.
        token_counts: [num_rows, at least vocab_size] int32, see above; rows contiguous.
        req_rows: [n] int32, the row of ``token_counts`` that belongs to each row of ``logits``; contiguous, as are the
            next three.
        repetition: [n] float32, 1 = off.
        presence: [n] float32, 0 = off.
        frequency: [n] float32, 0 = off.
        out: [n, vocab_size] float32 contiguous; made when not given.

    Raises:
        ValueError: A shape does not fit, or what must be contiguous is not.
    """
    check_rows(len(logits), 1, logits=logits)
    n, vocab_size = logits.shape
    check_rows(len(token_counts), vocab_size, token_counts=token_counts)
    check_contiguous((n,), req_rows=req_rows, repetition=repetition, presence=presence, frequency=frequency)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device) if out is None else out
    check_contiguous((n, vocab_size), out=out)
    if n == 0:
        return out
    _penalties_kernel[(n, triton.cdiv(vocab_size, 1024))](
        logits,
        token_counts,
        req_rows,
        repetition,
        presence,
        frequency,
        out,
        logits.stride(0),
        token_counts.stride(0),
        vocab_size,
        BLOCK=1024,
        num_warps=4,
        **dependent_launch(logits),
    )
    return out


def forbid(scores: torch.Tensor, forbidden_ids: torch.Tensor) -> None:
    """Set some ids' scores to minus infinity, in place: they will never be sampled.

    Args:
        scores: [n, vocab_size], any float dtype; rows may be strided, their elements not. Changed.
        forbidden_ids: [n, width] int32 contiguous; -1 fills up.

    Raises:
        ValueError: A shape does not fit, or what must be contiguous is not.
    """
    n, width = len(scores), forbidden_ids.shape[-1]
    check_rows(n, 1, scores=scores)
    check_contiguous((n, width), forbidden_ids=forbidden_ids)
    if n and width:
        block = triton.next_power_of_2(width)
        _forbid_kernel[(n,)](
            scores, forbidden_ids, scores.stride(0), width, BLOCK=block, num_warps=1, **dependent_launch(scores)
        )


@triton.jit
def _penalties_kernel(
    logits,
    token_counts,
    req_rows,
    repetition,
    presence,
    frequency,
    out,
    logits_stride,
    counts_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token_id < vocab_size
    wait_for_previous(PDL)
    req_row = tl.load(req_rows + row).to(tl.int64)
    seen = tl.load(token_counts + req_row * counts_stride + token_id, mask=inside, other=0)
    score = tl.load(logits + row * logits_stride + token_id, mask=inside, other=0).to(tl.float32)
    factor = tl.load(repetition + row)
    score = tl.where(seen != 0, tl.where(score > 0, score / factor, score * factor), score)
    generated = (seen & _COUNT_MASK).to(tl.float32)
    score -= tl.load(presence + row) * (generated > 0).to(tl.float32)
    score -= tl.load(frequency + row) * generated
    tl.store(out + row * vocab_size + token_id, score, mask=inside)


@triton.jit
def _forbid_kernel(scores, forbidden_ids, scores_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    token_id = tl.load(forbidden_ids + row * width + column, mask=column < width, other=-1)
    tl.store(scores + row * scores_stride + token_id, float("-inf"), mask=token_id >= 0)
