"""Rows of one rank's shard of the embedding table; zeros for ids of other shards, so that the ranks' sum is the row.

One program per token and block of columns.
"""

import torch


def embedding_reference(
    token_ids: torch.Tensor, table: torch.Tensor, *, first_id: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Do what ``embedding`` does, in plain torch."""
    local_ids = token_ids.long() - first_id
    ours = (local_ids >= 0) & (local_ids < table.shape[0])
    rows = table[torch.where(ours, local_ids, 0)] * ours.unsqueeze(-1)
    return rows if out is None else out.copy_(rows)
