"""Attention on a CPU, through the Token Table: decode rows together, prefill chunks one by one."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lightserve.model_worker.cpu.decode_attention import AttentionShape, DecodePlan, attend_decode, plan_decode
from lightserve.model_worker.cpu.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One request's chunk.

    Attributes:
        tokens: Its tokens in the batch.
        slots: [seq_len] int64.
        mask: [extend_len, seq_len], 0 or -inf; None for a chunk that starts its request: plainly causal.
    """

    tokens: slice
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one batch share."""

    num_decode: int
    decode: DecodePlan | None
    chunks: list[PrefillChunk]


def plan_attention(batch: ForwardBatch, shape: AttentionShape) -> AttentionPlan:
    """Derive indices, masks and buffers from the Token Table."""
    host = batch.host
    chunks = [_plan_chunk(batch, index, shape.dtype) for index in range(host.num_decode, host.num_reqs)]
    return AttentionPlan(host.num_decode, plan_decode(batch, shape) if host.num_decode else None, chunks)


def attend(q: torch.Tensor, kv_layer: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Attend from every token of the batch to its request's slots.

    Args:
        q: [num_tokens, num_heads, head_dim].
        kv_layer: [num_slots + 1, 2, num_kv_heads, head_dim].
        plan: From ``plan_attention``.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    parts = [] if plan.decode is None else [attend_decode(q[: plan.num_decode], kv_layer, plan.decode)]
    parts += [_attend_chunk(q[chunk.tokens], kv_layer, chunk) for chunk in plan.chunks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _plan_chunk(batch: ForwardBatch, index: int, dtype: torch.dtype) -> PrefillChunk:
    start, seq_len = int(batch.host.starts[index]), int(batch.host.seq_lens[index])
    first, last = batch.host.cu_seqlens[index : index + 2].tolist()
    slots = batch.req_to_slots[int(batch.host.req_rows[index]), :seq_len].long()
    if start == 0:
        return PrefillChunk(slice(first, last), slots, None)
    is_ahead = torch.arange(seq_len) > torch.arange(start, seq_len).unsqueeze(1)
    mask = torch.zeros(is_ahead.shape, dtype=dtype).masked_fill_(is_ahead, -math.inf)
    return PrefillChunk(slice(first, last), slots, mask)


def _attend_chunk(q: torch.Tensor, kv_layer: torch.Tensor, chunk: PrefillChunk) -> torch.Tensor:
    k, v = kv_layer.index_select(0, chunk.slots).permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, enable_gqa=True
    )
    return attended.squeeze(0).transpose(0, 1)
