"""Put a step's tokens in place: complete ids by what was sampled last, enter slots in the Token Table.

token_ids[t] = max(next_token[token_rows[t]], 0) where given_ids[t] < 0, else given_ids[t]
req_to_slots[token_rows[t], positions[t]] = out_slots[t]
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.checks import check_contiguous, check_rows
from lightserve.kernels.launch import dependent_launch, wait_for_previous


def place_tokens_reference(
    given_ids: torch.Tensor,
    next_token: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    out_slots: torch.Tensor,
    req_to_slots: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what ``place_tokens`` does, in plain torch."""
    rows = token_rows.long()
    req_to_slots[rows, positions.long()] = out_slots
    token_ids = torch.where(given_ids < 0, next_token[rows].clamp_min(0), given_ids)
    return token_ids if out is None else out.copy_(token_ids)


def place_tokens(
    given_ids: torch.Tensor,
    next_token: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    out_slots: torch.Tensor,
    req_to_slots: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Complete the ids of a step's tokens and write their slots to the Token Table.

    Args:
        given_ids: [num_tokens] int32, negative for a token that was sampled in the step before; contiguous, as are all
            but ``req_to_slots``.
        next_token: [num_rows] int32, what was sampled last; a negative one (a failed row's) counts as 0.
        token_rows: [num_tokens] int32, each token's row.
        positions: [num_tokens] int32, each token's position in its request.
        out_slots: [num_tokens] int32, each token's slot.
        req_to_slots: [num_rows, width] int32, the Token Table, rows contiguous, changed. No two tokens of real rows
            meet in one place.
        out: [num_tokens] int32; made when not given.

    Returns:
        The ids, none negative.

    Raises:
        ValueError: A shape does not fit, or what must be contiguous is not.
    """
    num_tokens, num_rows = len(given_ids), len(next_token)
    out = given_ids.new_empty(num_tokens) if out is None else out
    check_contiguous(
        (num_tokens,), given_ids=given_ids, token_rows=token_rows, positions=positions, out_slots=out_slots, out=out
    )
    check_contiguous((num_rows,), next_token=next_token)
    check_rows(num_rows, 1, req_to_slots=req_to_slots)
    if num_tokens:
        _place_tokens_kernel[(triton.cdiv(num_tokens, BLOCK),)](
            given_ids,
            next_token,
            token_rows,
            positions,
            out_slots,
            req_to_slots,
            out,
            req_to_slots.stride(0),
            num_tokens,
            BLOCK=BLOCK,
            num_warps=4,
            **dependent_launch(given_ids),
        )
    return out


BLOCK = 128


@triton.jit(do_not_specialize=["num_tokens"])
def _place_tokens_kernel(
    given_ids,
    next_token,
    token_rows,
    positions,
    out_slots,
    req_to_slots,
    out,
    table_stride,
    num_tokens,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    wait_for_previous(PDL)
    row = tl.load(token_rows + token, mask=inside, other=0).to(tl.int64)
    given = tl.load(given_ids + token, mask=inside, other=0)
    sampled = tl.load(next_token + row, mask=inside & (given < 0), other=0)
    tl.store(out + token, tl.where(given < 0, tl.maximum(sampled, 0), given), mask=inside)
    position = tl.load(positions + token, mask=inside, other=0)
    slot = tl.load(out_slots + token, mask=inside, other=0)
    tl.store(req_to_slots + row * table_stride + position, slot, mask=inside)
