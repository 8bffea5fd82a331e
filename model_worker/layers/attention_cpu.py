"""Attention on a CPU, through the Token Table: K and V are gathered into dense tiles, then multiplied by the library.

Decode rows of similar length share one batched product: rows are sorted by length and cut into groups, each padded to
its longest row. The gather takes one row of ``head_dim`` per (token, head), so that it also brings the heads together,
which the product needs and a gather of whole tokens would have to copy once more for.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from lightserve.model_worker.forward_batch import ForwardBatch, Int32Array

# A group costs about as much in calls (60 µs per layer) as 1,000 padded tokens do in copies and products.
_PADDING_WORTH_A_GROUP = 1000


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows that share one product.

    Attributes:
        members: [n] int64, their indices in the batch; None: all decode rows, in order.
        kv_index: [2 * n * num_kv_heads * padded_len] int64, rows of the cache seen as [-1, head_dim]: K of every row,
            head and position, then V.
        mask: [n * num_kv_heads, 1, padded_len], 0 where a token is and -inf where none is; None when no row is padded.
    """

    members: torch.Tensor | None
    kv_index: torch.Tensor
    mask: torch.Tensor | None
    num_reqs: int
    padded_len: int


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
    groups: list[DecodeGroup]
    chunks: list[PrefillChunk]


def plan_attention(batch: ForwardBatch, *, num_kv_heads: int, padding_slot: int, dtype: torch.dtype) -> AttentionPlan:
    """Derive gather indices and masks from the Token Table.

    Args:
        batch: The step's batch.
        num_kv_heads: This rank's.
        padding_slot: A slot that holds zeros: stale slots may hold anything, and 0 * NaN is NaN.
        dtype: Of queries and cache.
    """
    host = batch.host
    groups = [
        _decode_group(batch, members, num_kv_heads, padding_slot, dtype)
        for members in group_by_length(host.seq_lens[: host.num_decode])
    ]
    chunks = [_prefill_chunk(batch, index, dtype) for index in range(host.num_decode, host.num_reqs)]
    return AttentionPlan(host.num_decode, groups, chunks)


def group_by_length(seq_lens: Int32Array) -> list[Int32Array]:
    """Cut rows into groups of similar length, longest first.

    Returns:
        Indices of each group's rows; together a permutation.
    """
    longest_first = np.argsort(-seq_lens, kind="stable").astype(np.int32)
    bounds, padding, longest = [0], 0, 0
    for index, seq_len in enumerate(seq_lens[longest_first].tolist()):
        padding += longest - seq_len if index else 0
        if index == 0 or padding > _PADDING_WORTH_A_GROUP:
            bounds, padding, longest = [*bounds, index], 0, seq_len
    return np.split(longest_first, bounds[2:]) if len(seq_lens) else []


def _decode_group(
    batch: ForwardBatch, members: Int32Array, num_kv_heads: int, padding_slot: int, dtype: torch.dtype
) -> DecodeGroup:
    indices = torch.from_numpy(members).long()
    seq_lens = batch.seq_lens[indices]
    padded_len = int(batch.host.seq_lens[members[0]])
    is_absent = torch.arange(padded_len) >= seq_lens.unsqueeze(1)  # [n, padded_len]
    slots = batch.req_to_slots[batch.req_rows[indices], :padded_len].long().masked_fill_(is_absent, padding_slot)
    heads = torch.arange(2 * num_kv_heads).view(2, 1, num_kv_heads, 1)  # K of every head, then V
    kv_index = slots.view(1, len(members), 1, padded_len) * (2 * num_kv_heads) + heads
    is_ragged = bool(batch.host.seq_lens[members[-1]] < padded_len)
    return DecodeGroup(
        members=None if _is_in_order(members, batch.host.num_decode) else indices,
        kv_index=kv_index.flatten(),
        mask=_mask(is_absent, dtype).repeat_interleave(num_kv_heads, 0).unsqueeze(1) if is_ragged else None,
        num_reqs=len(members),
        padded_len=padded_len,
    )


def _is_in_order(members: Int32Array, num_decode: int) -> bool:
    return len(members) == num_decode and bool((np.diff(members) == 1).all())


def _prefill_chunk(batch: ForwardBatch, index: int, dtype: torch.dtype) -> PrefillChunk:
    start, seq_len = int(batch.host.starts[index]), int(batch.host.seq_lens[index])
    first, last = batch.host.cu_seqlens[index : index + 2].tolist()
    slots = batch.req_to_slots[int(batch.host.req_rows[index]), :seq_len].long()
    if start == 0:
        return PrefillChunk(slice(first, last), slots, None)
    is_ahead = torch.arange(seq_len) > torch.arange(start, seq_len).unsqueeze(1)
    return PrefillChunk(slice(first, last), slots, _mask(is_ahead, dtype))


def _mask(is_hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, float("-inf"))


def attend(q: torch.Tensor, kv_layer: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Attend from every token of the batch to its request's slots.

    Args:
        q: [num_tokens, num_heads, head_dim].
        kv_layer: [num_slots + 1, 2, num_kv_heads, head_dim].
        plan: From ``plan_attention``.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    out = torch.empty_like(q)
    for group in plan.groups:
        if group.members is None:
            out[: plan.num_decode] = _attend_group(q[: plan.num_decode], kv_layer, group)
        else:
            out[group.members] = _attend_group(q[group.members], kv_layer, group)
    for chunk in plan.chunks:
        out[chunk.tokens] = _attend_chunk(q[chunk.tokens], kv_layer, chunk)
    return out


def _attend_group(q: torch.Tensor, kv_layer: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
    num_kv_heads, head_dim = kv_layer.shape[2:]
    gathered = kv_layer.view(-1, head_dim).index_select(0, group.kv_index)
    k, v = gathered.view(2, group.num_reqs * num_kv_heads, group.padded_len, head_dim).unbind(0)
    queries = q.reshape(group.num_reqs * num_kv_heads, -1, head_dim)  # the query heads of one kv head together
    scores = torch.bmm(queries * head_dim**-0.5, k.transpose(1, 2))
    if group.mask is not None:
        scores += group.mask
    return torch.bmm(scores.softmax(-1), v).view(q.shape)


def _attend_chunk(q: torch.Tensor, kv_layer: torch.Tensor, chunk: PrefillChunk) -> torch.Tensor:
    k, v = kv_layer.index_select(0, chunk.slots).permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, enable_gqa=True
    )
    return attended.squeeze(0).transpose(0, 1)
