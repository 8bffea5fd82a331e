"""Attention of decode rows on a CPU, in few and large library calls.

Rows, sorted by length, are cut into groups of similar length, each padded to its longest row. Then per layer

    K       one gather brings K of all groups together, one cache row of head_dim per (request, kv head, position)
    scores  one batched product per group: the query heads that share a kv head times its gathered K
    P · V   one weighted embedding bag per query head, which reads every row of V where it lies: no gather, no copy

so K is copied once and V never. To gather both and multiply twice per group takes 1.3 to 1.6 times as long (64 requests
of 200 tokens, 9 query and 3 kv heads of 64, bfloat16).
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from lightserve.model_worker.cpu.forward_batch import ForwardBatch

# A group costs about as much, in calls and small products, as 1,000 padded tokens (64 requests of 50 to 350 tokens).
_PADDING_WORTH_A_GROUP = 1000
# oneDNN generates code for every shape it meets (0.3 ms): lengths that stay the same for a while spare that.
_LENGTH_STEP = 16


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """This rank's heads, and the cache they read.

    Attributes:
        padding_slot: The last slot; it holds zeros. Stale entries of the Token Table must not be read in its place:
            their slots may hold NaN, and 0 * NaN is NaN.
        dtype: Of queries and cache.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    padding_slot: int
    dtype: torch.dtype

    @property
    def index_dtype(self) -> torch.dtype:
        """int32 halves what is read beside the cache itself, where it can count the cache's rows."""
        num_rows = (self.padding_slot + 1) * 2 * self.num_kv_heads
        return torch.int32 if num_rows <= torch.iinfo(torch.int32).max else torch.int64


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows that share one product; tensors are views of the plan's buffers.

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
    """What all layers share of a batch's decode rows. A cache row is one head's K or V of one slot.

    Attributes:
        order: [num_decode] int64, the rows by length, longest first; None when they come in that order.
        groups: In order of length; their parts of the buffers and indices below follow each other.
        k_index: Cache rows of K: per group, request, kv head and position.
        k: [len(k_index), head_dim], buffer.
        scores: Buffer, flat: per group, request, head and position.
        probs: As ``scores``.
        mask: As ``scores``: 0 where a token is, -inf where none is.
        v_index: As ``scores``: cache rows of V.
        v_starts: [num_decode * num_heads], where each request's and head's part of ``v_index`` starts.
    """

    order: torch.Tensor | None
    groups: list[DecodeGroup]
    k_index: torch.Tensor
    k: torch.Tensor
    scores: torch.Tensor
    probs: torch.Tensor
    mask: torch.Tensor
    v_index: torch.Tensor
    v_starts: torch.Tensor


def plan_decode(batch: ForwardBatch, shape: AttentionShape) -> DecodePlan:
    """Derive groups, indices and buffers from the Token Table; there is at least one decode row."""
    seq_lens = batch.host.seq_lens[: batch.host.num_decode]
    order = np.argsort(-seq_lens, kind="stable")
    members = np.split(order, group_by_length(seq_lens[order].tolist())[1:])
    slots = [_padded_slots(batch, rows, shape.padding_slot) for rows in members]
    num_tokens = sum(group.numel() for group in slots)
    k = torch.empty(num_tokens * shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
    scores = torch.empty(num_tokens * shape.num_heads, dtype=shape.dtype)
    probs = torch.empty_like(scores)
    return DecodePlan(
        order=None if (np.diff(order) == 1).all() else torch.from_numpy(order),
        groups=_make_groups(slots, k, scores, probs, shape),
        k_index=_cache_rows(slots, 0, 1, shape),
        k=k,
        scores=scores,
        probs=probs,
        mask=_mask(slots, shape),
        v_index=_cache_rows(slots, 1, shape.num_heads // shape.num_kv_heads, shape),
        v_starts=_v_starts(slots, shape),
    )


def attend_decode(q: torch.Tensor, kv_layer: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
    """Attend from one token per request to its request's slots.

    Args:
        q: [num_decode, num_heads, head_dim].
        kv_layer: [num_slots + 1, 2, num_kv_heads, head_dim].
        plan: From ``plan_decode``.

    Returns:
        [num_decode, num_heads, head_dim].
    """
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
    plan.scores.add_(plan.mask)
    for group in plan.groups:
        torch.softmax(group.scores, -1, out=group.probs)
    bags = F.embedding_bag(plan.v_index, cache_rows, plan.v_starts, mode="sum", per_sample_weights=plan.probs)
    attended = bags.view(q.shape)
    return attended if plan.order is None else torch.empty_like(attended).index_copy_(0, plan.order, attended)


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


def _padded_slots(batch: ForwardBatch, rows: npt.NDArray[np.int64], padding_slot: int) -> torch.Tensor:
    """[n, padded_len] int64, the padding slot beyond each row's length."""
    longest = int(batch.host.seq_lens[rows[0]])
    padded_len = min(-(-longest // _LENGTH_STEP) * _LENGTH_STEP, batch.req_to_slots.shape[1])
    indices = torch.from_numpy(rows)
    is_absent = torch.arange(padded_len) >= batch.seq_lens[indices].unsqueeze(1)
    slots = batch.req_to_slots[batch.req_rows[indices], :padded_len].long()
    return slots.masked_fill_(is_absent, padding_slot)


def _make_groups(
    slots: list[torch.Tensor], k: torch.Tensor, scores: torch.Tensor, probs: torch.Tensor, shape: AttentionShape
) -> list[DecodeGroup]:
    groups, first_row = [], 0
    head_parts = [group.numel() * shape.num_heads for group in slots]
    k_parts = torch.split(k, [group.numel() * shape.num_kv_heads for group in slots])
    parts = zip(slots, k_parts, torch.split(scores, head_parts), torch.split(probs, head_parts), strict=True)
    for group, k_part, scores_part, probs_part in parts:
        num_reqs, padded_len = group.shape
        num_products = num_reqs * shape.num_kv_heads
        groups.append(
            DecodeGroup(
                rows=slice(first_row, first_row + num_reqs),
                k=k_part.view(num_products, padded_len, shape.head_dim).transpose(1, 2),
                scores=scores_part.view(num_products, -1, padded_len),
                probs=probs_part.view(num_products, -1, padded_len),
            )
        )
        first_row += num_reqs
    return groups


def _cache_rows(slots: list[torch.Tensor], k_or_v: int, repeats: int, shape: AttentionShape) -> torch.Tensor:
    """Cache rows per group, request, kv head (``repeats`` times each) and position."""
    heads = torch.arange(shape.num_kv_heads).repeat_interleave(repeats) + k_or_v * shape.num_kv_heads
    rows = [group.unsqueeze(1) * (2 * shape.num_kv_heads) + heads.unsqueeze(1) for group in slots]
    return torch.cat([group.to(shape.index_dtype).flatten() for group in rows])


def _mask(slots: list[torch.Tensor], shape: AttentionShape) -> torch.Tensor:
    masks = []
    for group in slots:
        mask = torch.zeros(group.shape, dtype=shape.dtype).masked_fill_(group == shape.padding_slot, -math.inf)
        masks.append(mask.unsqueeze(1).expand(-1, shape.num_heads, -1).flatten())
    return torch.cat(masks)


def _v_starts(slots: list[torch.Tensor], shape: AttentionShape) -> torch.Tensor:
    bag_lens = torch.cat([torch.full((len(group) * shape.num_heads,), group.shape[1]) for group in slots])
    return (bag_lens.cumsum(0) - bag_lens).to(shape.index_dtype)
