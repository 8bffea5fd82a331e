"""Rows of one rank's shard of the embedding table; zeros for ids of other shards, so that the ranks' sum is the row.

One program per token and block of columns.
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.checks import check_contiguous
from lightserve.kernels.launch import dependent_launch, wait_for_previous


def embedding_reference(
    token_ids: torch.Tensor, table: torch.Tensor, *, first_id: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what ``embedding`` does, in plain torch."""
    local_ids = token_ids.long() - first_id
    ours = (local_ids >= 0) & (local_ids < table.shape[0])
    rows = table[torch.where(ours, local_ids, 0)] * ours.unsqueeze(-1)
    return rows if out is None else out.copy_(rows)


def embedding(
    token_ids: torch.Tensor, table: torch.Tensor, *, first_id: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Look ids up in one shard of the embedding table.

    Args:
        token_ids: [num_tokens] int32 or int64, contiguous.
        table: [vocab_shard, hidden] contiguous.
        first_id: The id that the shard's first row belongs to.
        out: [num_tokens, hidden] contiguous; made when not given. Zeros where the id is not in this shard.

    Raises:
        ValueError: A shape does not fit, or what must be contiguous is not.
    """
    num_tokens, vocab_shard, hidden = len(token_ids), len(table), table.shape[-1]
    check_contiguous((num_tokens,), token_ids=token_ids)
    check_contiguous((vocab_shard, hidden), table=table)
    out = table.new_empty(num_tokens, hidden) if out is None else out
    check_contiguous((num_tokens, hidden), out=out)
    if num_tokens == 0:
        return out
    block = min(triton.next_power_of_2(hidden), 1024)
    _embedding_kernel[(num_tokens, triton.cdiv(hidden, block))](
        token_ids, table, out, first_id, vocab_shard, hidden, BLOCK=block, num_warps=4, **dependent_launch(table)
    )
    return out


@triton.jit
def _embedding_kernel(token_ids, table, out, first_id, vocab_shard, hidden, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    wait_for_previous(PDL)
    local_id = tl.load(token_ids + token).to(tl.int64) - first_id
    ours = (local_id >= 0) & (local_id < vocab_shard)
    row = tl.load(table + tl.where(ours, local_id, 0) * hidden + column, mask=inside, other=0)
    tl.store(out + token * hidden + column, tl.where(ours, row, 0), mask=inside)
