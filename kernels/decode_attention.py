"""Attention of one query token per request over its slots (TokenAttention's decode step).

out[i, h] = softmax(scale · q[i, h] · K_iᵀ) · V_i,   K_i, V_i = the rows kv_layer[req_to_slots[req_rows[i], :seq_lens[i]]]
"""

import torch


def decode_attention_reference(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    req_to_slots: torch.Tensor,
    req_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what ``decode_attention`` does, in plain torch."""
    out = torch.empty_like(q) if out is None else out
    for i, (req_row, seq_len) in enumerate(zip(req_rows.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_slots[req_row, :seq_len].long()
        out[i] = attend_reference(q[i : i + 1], kv_layer[slots], scale)[0]
    return out


def attend_reference(q: torch.Tensor, kv: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend causally from the last tokens of one request to all of them, in float32.

    Args:
        q: [extend_len, num_heads, head_dim], of the positions [seq_len - extend_len, seq_len).
        kv: [seq_len, 2, num_kv_heads, head_dim].
        scale: Of the scores, before the softmax.

    Returns:
        [extend_len, num_heads, head_dim] float32; zeros when seq_len is 0.
    """
    extend_len, num_heads, head_dim = q.shape
    seq_len, _, num_kv_heads, _ = kv.shape
    grouped = q.float().view(extend_len, num_kv_heads, num_heads // num_kv_heads, head_dim)
    k, v = kv.float().unbind(1)
    scores = torch.einsum("qkgd,skd->kgqs", grouped, k) * scale
    unseen = torch.ones(extend_len, seq_len, dtype=torch.bool, device=q.device).triu(seq_len - extend_len + 1)
    probs = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    return torch.einsum("kgqs,skd->qkgd", probs, v).reshape(q.shape)
