"""Keep what a step sampled: each row's id for the next step and for penalties, and a packed result for the host.

next_token[req_rows[i]] = token_ids[i]
token_counts[req_rows[i], token_ids[i]] += 1, where token_ids[i] >= 0
out[out_row] = token_ids, then the bits of logprobs
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.checks import check_contiguous, check_rows
from lightserve.kernels.launch import dependent_launch, wait_for_previous


def commit_tokens_reference(
    token_ids: torch.Tensor,
    logprobs: torch.Tensor,
    req_rows: torch.Tensor,
    next_token: torch.Tensor,
    *,
    out_row: torch.Tensor,
    out: torch.Tensor,
    token_counts: torch.Tensor | None = None,
) -> None:
    """Do what ``commit_tokens`` does, in plain torch."""
    rows = req_rows.long()
    next_token[rows] = token_ids
    results = torch.cat([token_ids, logprobs.view(torch.int32)])
    out[int(out_row), : len(results)] = results
    if token_counts is not None:
        ones = (token_ids >= 0).to(torch.int32)
        token_counts.index_put_((rows, token_ids.clamp_min(0).long()), ones, accumulate=True)


def commit_tokens(
    token_ids: torch.Tensor,
    logprobs: torch.Tensor,
    req_rows: torch.Tensor,
    next_token: torch.Tensor,
    *,
    out_row: torch.Tensor,
    out: torch.Tensor,
    token_counts: torch.Tensor | None = None,
) -> None:
    """Write sampled ids to where the next step, the penalties and the host look for them.

    Args:
        token_ids: [n] int32, -1 for a failed row; contiguous, as are all but ``out`` and ``token_counts``.
        logprobs: [n] float32.
        req_rows: [n] int32, distinct except for padding rows.
        next_token: [num_rows] int32, changed.
        out_row: [1] int32, which row of ``out``.
        out: [r, width] int32, rows contiguous, at least 2 · n wide; may be page-locked host memory. The front
            of one row is written.
        token_counts: [num_rows, vocab_size] int32, rows contiguous, changed; when not given, nothing is counted.

    Raises:
        ValueError: A shape does not fit, or what must be contiguous is not.
    """
    n = len(token_ids)
    check_contiguous((n,), token_ids=token_ids, logprobs=logprobs, req_rows=req_rows)
    check_contiguous((len(next_token),), next_token=next_token)
    check_contiguous((1,), out_row=out_row)
    check_rows(len(out), 2 * n, out=out)
    if token_counts is not None:
        check_rows(len(token_counts), 1, token_counts=token_counts)
    if n:
        _commit_tokens_kernel[(triton.cdiv(n, BLOCK),)](
            token_ids,
            logprobs,
            req_rows,
            next_token,
            next_token if token_counts is None else token_counts,
            out_row,
            out,
            out.stride(0),
            0 if token_counts is None else token_counts.stride(0),
            n,
            COUNT=token_counts is not None,
            BLOCK=BLOCK,
            num_warps=4,
            **dependent_launch(token_ids),
        )


BLOCK = 128


@triton.jit(do_not_specialize=["n"])
def _commit_tokens_kernel(
    token_ids,
    logprobs,
    req_rows,
    next_token,
    token_counts,
    out_row,
    out,
    out_stride,
    counts_stride,
    n,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    wait_for_previous(PDL)
    token_id = tl.load(token_ids + index, mask=inside, other=-1)
    logprob = tl.load(logprobs + index, mask=inside, other=0)
    req_row = tl.load(req_rows + index, mask=inside, other=0).to(tl.int64)
    tl.store(next_token + req_row, token_id, mask=inside)
    results = out + tl.load(out_row).to(tl.int64) * out_stride
    tl.store(results + index, token_id, mask=inside)
    tl.store(results + n + index, logprob.to(tl.int32, bitcast=True), mask=inside)
    if COUNT:
        tl.atomic_add(token_counts + req_row * counts_stride + token_id, 1, mask=inside & (token_id >= 0))
