"""Causal attention of many query tokens per request over its slots, cached prefix included.

The query tokens of request i are rows [cu_seqlens[i], cu_seqlens[i + 1]) of q and stand at its last positions,
[seq_lens[i] - extend_len, seq_lens[i]); each sees every position up to its own, through the Token Table.
"""

import torch

from lightserve.kernels.decode_attention import attend_reference


def prefill_attention_reference(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    req_to_slots: torch.Tensor,
    req_rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what ``prefill_attention`` does, in plain torch."""
    out = torch.empty_like(q) if out is None else out
    bounds = cu_seqlens.tolist()
    for i, (req_row, seq_len) in enumerate(zip(req_rows.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_slots[req_row, :seq_len].long()
        out[bounds[i] : bounds[i + 1]] = attend_reference(q[bounds[i] : bounds[i + 1]], kv_layer[slots], scale)
    return out
