"""Attention on a CPU, through the Token Table, in few and large library calls.

Decode rows, sorted by length, are cut into groups of similar length, each padded to its longest row. Then per layer

    K       one gather brings K of all groups together, one row of head_dim per (request, kv head, position)
    scores  one batched product per group: the query heads that share a kv head times its gathered K
    P · V   one weighted embedding bag per query head, which reads every row of V where it lies: no gather, no copy

so K is copied once and V never. Gathering both and two products per group takes 1.3 to 1.6 times as long (64 requests of
200 tokens, 9 query and 3 kv heads of 64, bfloat16).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from lightserve.model_worker.forward_batch import ForwardBatch, Int32Array

# A group costs about as much, in calls and small products, as 1,000 padded tokens (64 requests of 50 to 350 tokens).
_PADDING_WORTH_A_GROUP = 1000
# oneDNN generates code for every shape it meets (0.3 ms): lengths that stay the same for a while spare that.
_LENGTH_STEP = 16


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows that share one product: views of the plan's buffers.

    Attributes:
        rows: Its rows, in order of length.
        k: [n * num_kv_heads, head_dim, padded_len].
        scores: [n * num_kv_heads, heads per kv head, padded_len].
        probs: As ``scores``.
    """

    rows: slice
    k: torch.Tensor
    scores: torch.Tensor
    probs: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What all layers share of a batch's decode rows. A row of the cache is one head's K or V of one slot.

    Attributes:
        order: [num_decode] int64, the rows by length, longest first; None when they are in order as they come.
        k_index: Rows of the cache, of K, in the order of ``k``.
        k: Buffer, [rows, head_dim].
        scores: Buffer, flat: each group's, one after the other.
        probs: Buffer, as ``scores``.
        mask: As ``scores``: 0 where a token is, -inf where none is; None when nothing is padded.
        v_index: Rows of the cache, of V, in the order of ``probs``.
        v_starts: [num_decode * num_heads], where each row's and head's part of ``v_index`` starts.
    """

    order: torch.Tensor | None
    k_index: torch.Tensor
    k: torch.Tensor
    scores: torch.Tensor
    probs: torch.Tensor
    mask: torch.Tensor | None
    v_index: torch.Tensor
    v_starts: torch.Tensor
    groups: list[DecodeGroup]


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


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """This rank's heads, and the cache they read.

    Attributes:
        padding_slot: The last slot; it holds zeros. Stale entries of the Token Table must not be read in its place:
            their slots may hold NaN, and 0 * NaN is NaN.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    padding_slot: int
    dtype: torch.dtype


def plan_attention(batch: ForwardBatch, shape: AttentionShape) -> AttentionPlan:
    """Derive indices, masks and buffers from the Token Table."""
    host = batch.host
    chunks = [_plan_chunk(batch, index, shape.dtype) for index in range(host.num_decode, host.num_reqs)]
    return AttentionPlan(host.num_decode, _plan_decode(batch, shape) if host.num_decode else None, chunks)


def attend(q: torch.Tensor, kv_layer: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Attend from every token of the batch to its request's slots.

    Args:
        q: [num_tokens, num_heads, head_dim].
        kv_layer: [num_slots + 1, 2, num_kv_heads, head_dim].
        plan: From ``plan_attention``.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    if plan.decode is not None and not plan.chunks:
        return _attend_decode(q, kv_layer, plan.decode)
    out = torch.empty_like(q)
    if plan.decode is not None:
        out[: plan.num_decode] = _attend_decode(q[: plan.num_decode], kv_layer, plan.decode)
    for chunk in plan.chunks:
        out[chunk.tokens] = _attend_chunk(q[chunk.tokens], kv_layer, chunk)
    return out


def group_by_length(seq_lens: list[int]) -> list[int]:
    """Cut rows that are sorted by length, longest first, into groups.

    Returns:
        The index of each group's first row.
    """
    starts, padding, longest = [], math.inf, 0
    for index, seq_len in enumerate(seq_lens):
        padding += longest - seq_len
        if padding > _PADDING_WORTH_A_GROUP:
            starts.append(index)
            padding, longest = 0, seq_len
    return starts


def _plan_decode(batch: ForwardBatch, shape: AttentionShape) -> DecodePlan:
    seq_lens = batch.host.seq_lens[: batch.host.num_decode]
    order = np.argsort(-seq_lens, kind="stable")
    sorted_lens = seq_lens[order]
    starts = group_by_length(sorted_lens.tolist())
    bounds = [*starts, len(order)]
    sizes = np.diff(bounds)
    padded_lens = np.minimum(-(-sorted_lens[starts] // _LENGTH_STEP) * _LENGTH_STEP, batch.req_to_slots.shape[1])
    num_padded = int((sizes * padded_lens).sum())
    k = torch.empty(num_padded * shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
    scores = torch.empty(num_padded * shape.num_heads, dtype=shape.dtype)
    probs = torch.empty_like(scores)

    groups, slots, offset = [], [], 0
    for start, size, padded_len in zip(starts, sizes.tolist(), padded_lens.tolist(), strict=True):
        rows = slice(start, start + size)
        slots.append(_group_slots(batch, order[rows], padded_len, shape.padding_slot))
        tokens = slice(offset, offset + size * padded_len)
        groups.append(_make_group(rows, tokens, padded_len, k, scores, probs, shape))
        offset = tokens.stop
    index_dtype = _index_dtype(shape)
    return DecodePlan(
        order=None if (np.diff(order) == 1).all() else torch.from_numpy(order),
        k_index=_cache_rows(slots, 0, 1, shape, index_dtype),
        k=k,
        scores=scores,
        probs=probs,
        mask=_decode_mask(slots, shape) if (sorted_lens != np.repeat(padded_lens, sizes)).any() else None,
        v_index=_cache_rows(slots, 1, shape.num_heads // shape.num_kv_heads, shape, index_dtype),
        v_starts=_v_starts(np.repeat(padded_lens, sizes), shape.num_heads).to(index_dtype),
        groups=groups,
    )


def _make_group(
    rows: slice,
    tokens: slice,
    padded_len: int,
    k: torch.Tensor,
    scores: torch.Tensor,
    probs: torch.Tensor,
    shape: AttentionShape,
) -> DecodeGroup:
    num_products = (rows.stop - rows.start) * shape.num_kv_heads
    k_rows = slice(tokens.start * shape.num_kv_heads, tokens.stop * shape.num_kv_heads)
    columns = slice(tokens.start * shape.num_heads, tokens.stop * shape.num_heads)
    return DecodeGroup(
        rows=rows,
        k=k[k_rows].view(num_products, padded_len, shape.head_dim).transpose(1, 2),
        scores=scores[columns].view(num_products, -1, padded_len),
        probs=probs[columns].view(num_products, -1, padded_len),
    )


def _group_slots(batch: ForwardBatch, members: np.ndarray, padded_len: int, padding_slot: int) -> torch.Tensor:
    """[n, padded_len] int64, the padding slot beyond each row's length."""
    indices = torch.from_numpy(members)
    is_absent = torch.arange(padded_len) >= batch.seq_lens[indices].unsqueeze(1)
    slots = batch.req_to_slots[batch.req_rows[indices], :padded_len].long()
    return slots.masked_fill_(is_absent, padding_slot)


def _cache_rows(
    slots: list[torch.Tensor], k_or_v: int, repeats: int, shape: AttentionShape, dtype: torch.dtype
) -> torch.Tensor:
    """For every group, row, kv head and position, ``repeats`` times per kv head: the row of the cache."""
    num_kv_heads = shape.num_kv_heads
    heads = torch.arange(num_kv_heads).repeat_interleave(repeats).view(1, -1, 1)
    first = 2 * num_kv_heads
    rows = [(group.unsqueeze(1) * first + (heads + k_or_v * num_kv_heads)).to(dtype).flatten() for group in slots]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _decode_mask(slots: list[torch.Tensor], shape: AttentionShape) -> torch.Tensor:
    masks = [
        _mask(group == shape.padding_slot, shape.dtype).unsqueeze(1).expand(-1, shape.num_heads, -1).flatten()
        for group in slots
    ]
    return torch.cat(masks)


def _v_starts(padded_lens: Int32Array, num_heads: int) -> torch.Tensor:
    lens = np.repeat(padded_lens.astype(np.int64), num_heads)
    return torch.from_numpy(np.cumsum(lens) - lens)


def _index_dtype(shape: AttentionShape) -> torch.dtype:
    """int32 halves what is read beside the cache itself, where it can count the cache's rows."""
    num_rows = (shape.padding_slot + 1) * 2 * shape.num_kv_heads
    return torch.int32 if num_rows <= torch.iinfo(torch.int32).max else torch.int64


def _plan_chunk(batch: ForwardBatch, index: int, dtype: torch.dtype) -> PrefillChunk:
    start, seq_len = int(batch.host.starts[index]), int(batch.host.seq_lens[index])
    first, last = batch.host.cu_seqlens[index : index + 2].tolist()
    slots = batch.req_to_slots[int(batch.host.req_rows[index]), :seq_len].long()
    if start == 0:
        return PrefillChunk(slice(first, last), slots, None)
    is_ahead = torch.arange(seq_len) > torch.arange(start, seq_len).unsqueeze(1)
    return PrefillChunk(slice(first, last), slots, _mask(is_ahead, dtype))


def _mask(is_hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, -math.inf)


def _attend_decode(q: torch.Tensor, kv_layer: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
    num_decode, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[2]
    cache_rows = kv_layer.view(-1, head_dim)
    scaled = q * head_dim**-0.5
    if plan.order is not None:
        scaled = scaled[plan.order]
    torch.index_select(cache_rows, 0, plan.k_index, out=plan.k)
    by_kv_head = scaled.view(num_decode, num_kv_heads, num_heads // num_kv_heads, head_dim)
    for group in plan.groups:
        torch.bmm(by_kv_head[group.rows].flatten(0, 1), group.k, out=group.scores)
    if plan.mask is not None:
        plan.scores.add_(plan.mask)
    for group in plan.groups:
        torch.softmax(group.scores, -1, out=group.probs)
    attended = F.embedding_bag(plan.v_index, cache_rows, plan.v_starts, mode="sum", per_sample_weights=plan.probs).view(
        q.shape
    )
    return attended if plan.order is None else torch.empty_like(q).index_copy_(0, plan.order, attended)


def _attend_chunk(q: torch.Tensor, kv_layer: torch.Tensor, chunk: PrefillChunk) -> torch.Tensor:
    k, v = kv_layer.index_select(0, chunk.slots).permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, enable_gqa=True
    )
    return attended.squeeze(0).transpose(0, 1)
