"""Attention of one query token per request over its slots (TokenAttention's decode step).

    out[i, h] = softmax(scale · q[i, h] · Kᵀ) · V,  K and V of request i at req_to_slots[req_rows[i], :seq_lens[i]]

Each request's tokens are cut into items of about equal size, so that one long request fills the device as well as many
short ones; ``plan_decode`` does it on the device, once a step for all layers, so that one CUDA graph serves every length.
One program per item and kv head: the query heads of the group share each K and V that it gathers through the Token Table.
The program that ends a request's last item merges the items' partial results. Scores, softmax and sums in float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lightserve.kernels.dot import dot
from lightserve.kernels.launch import dependent_launch, num_multiprocessors, wait_for_previous


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


@dataclass(frozen=True)
class DecodePlan:
    """How a step's decode attention is cut into items, and where the items meet.

    Attributes:
        items: [max_items, 8] int32: request (-1: none), its row of the Token Table, first position, end, the request's
            first item, its number of items.
        partial_out: [max_items, num_heads, head_dim] float32, each item's own attention.
        partial_lse: [max_items, num_heads] float32, log2 of its softmax denominator.
        arrivals: [num_reqs, num_kv_heads] int32, items that are done; zeros between launches.
    """

    items: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    arrivals: torch.Tensor


def plan_decode(
    req_rows: torch.Tensor, seq_lens: torch.Tensor, *, num_heads: int, num_kv_heads: int, head_dim: int
) -> DecodePlan:
    """Cut the requests into items, on the device.

    Args:
        req_rows: [num_reqs] int32.
        seq_lens: [num_reqs] int32, 0 for a padding row.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Width of a head.
    """
    (num_reqs,) = seq_lens.shape
    device = seq_lens.device
    target_items = max(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device) // num_kv_heads, 1)
    max_items = num_reqs + max(num_reqs, target_items)
    plan = DecodePlan(
        items=torch.empty(max_items, 8, dtype=torch.int32, device=device),
        partial_out=torch.empty(max_items, num_heads, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(max_items, num_heads, dtype=torch.float32, device=device),
        arrivals=torch.empty(num_reqs, num_kv_heads, dtype=torch.int32, device=device),
    )
    if num_reqs:
        _plan_kernel[(1,)](
            req_rows,
            seq_lens,
            plan.items,
            plan.arrivals,
            num_reqs,
            max_items,
            target_items,
            num_kv_heads,
            MIN_CHUNK,
            BLOCK_TOKENS=BLOCK_TOKENS,
            BLOCK_REQS=triton.next_power_of_2(num_reqs),
            num_warps=4,
            **dependent_launch(seq_lens),
        )
    return plan


def decode_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    req_to_slots: torch.Tensor,
    req_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    plan: DecodePlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with one query token per request.

    Args:
        q: [num_reqs, num_heads, head_dim]; each request's heads contiguous.
        kv_layer: [num_slots, 2, num_kv_heads, head_dim], one layer of the cache.
        req_to_slots: [num_rows, width] int32, the Token Table.
        req_rows: [num_reqs] int32.
        seq_lens: [num_reqs] int32; 0 (a padding row) gives zeros.
        scale: Of the scores, before the softmax.
        plan: ``plan_decode`` of the same ``req_rows`` and ``seq_lens``; made when not given.
        out: [num_reqs, num_heads, head_dim] contiguous; made when not given.

    Raises:
        ValueError: The shapes do not fit.
    """
    num_reqs, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[2]
    if num_heads % num_kv_heads or kv_layer.shape[3] != head_dim:
        raise ValueError(f"q {tuple(q.shape)} does not fit kv_layer {tuple(kv_layer.shape)}")
    if q.stride()[1:] != (head_dim, 1) or kv_layer.stride(3) != 1 or req_to_slots.stride(1) != 1:
        raise ValueError("the heads of q, a head of kv_layer and a row of req_to_slots must be contiguous")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_reqs == 0:
        return out
    if plan is None:
        plan = plan_decode(req_rows, seq_lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    group = num_heads // num_kv_heads
    _decode_attention_kernel[(plan.items.shape[0] * num_kv_heads,)](
        q,
        kv_layer,
        req_to_slots,
        out,
        plan.items,
        plan.partial_out,
        plan.partial_lse,
        plan.arrivals,
        scale * LOG2_E,
        q.stride(0),
        *kv_layer.stride()[:3],
        req_to_slots.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_GROUP=max(triton.next_power_of_2(group), 16),  # tl.dot takes no fewer rows
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        BLOCK_TOKENS=BLOCK_TOKENS,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        **dependent_launch(q),
    )
    return out


LOG2_E = 1.4426950408889634
BLOCK_TOKENS = 64
NUM_WARPS = 4
NUM_STAGES = 5
MIN_CHUNK = 512
PROGRAMS_PER_MULTIPROCESSOR = 4


@triton.jit
def _plan_kernel(
    req_rows,
    seq_lens,
    items,
    arrivals,
    num_reqs,
    max_items,
    target_items,
    num_kv_heads,
    min_chunk,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    PDL: tl.constexpr,
):
    req = tl.arange(0, BLOCK_REQS)
    wait_for_previous(PDL)
    seq_len = tl.load(seq_lens + req, mask=req < num_reqs, other=0)
    req_row = tl.load(req_rows + req, mask=req < num_reqs, other=0)
    total = tl.sum(seq_len)
    num_active = tl.sum((seq_len > 0).to(tl.int32))
    # at least the mean length or the total over target_items: so items <= num_reqs + max(num_reqs, target_items)
    chunk = tl.cdiv(total, tl.maximum(num_active, target_items))
    chunk = tl.cdiv(tl.maximum(chunk, min_chunk), BLOCK_TOKENS) * BLOCK_TOKENS
    even = tl.cdiv(seq_len, tl.maximum(tl.cdiv(seq_len, chunk), 1))
    own_chunk = tl.maximum(tl.cdiv(even, BLOCK_TOKENS), 1) * BLOCK_TOKENS
    num_items = tl.where(req < num_reqs, tl.maximum(tl.cdiv(seq_len, own_chunk), 1), 0)
    first = tl.cumsum(num_items) - num_items
    for i in range(0, tl.max(num_items)):
        record = items + (first + i) * 8
        mine = i < num_items
        tl.store(record, req, mask=mine)
        tl.store(record + 1, req_row, mask=mine)
        tl.store(record + 2, i * own_chunk, mask=mine)
        tl.store(record + 3, tl.minimum((i + 1) * own_chunk, seq_len), mask=mine)
        tl.store(record + 4, first, mask=mine)
        tl.store(record + 5, num_items, mask=mine)
    for start in range(tl.sum(num_items), max_items, BLOCK_REQS):
        tl.store(items + (start + req) * 8, -1, mask=start + req < max_items)
    for head in range(0, num_kv_heads):
        tl.store(arrivals + req * num_kv_heads + head, 0, mask=req < num_reqs)


@triton.jit
def _decode_attention_kernel(
    q,
    kv_layer,
    req_to_slots,
    out,
    items,
    partial_out,
    partial_lse,
    arrivals,
    scale_log2,
    q_stride,
    slot_stride,
    kv_stride,
    head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    item = tl.program_id(0) // NUM_KV_HEADS
    wait_for_previous(PDL)
    req = tl.load(items + item * 8).to(tl.int64)
    if req < 0:
        return
    req_row = tl.load(items + item * 8 + 1).to(tl.int64)
    start = tl.load(items + item * 8 + 2)
    end = tl.load(items + item * 8 + 3)
    first_item = tl.load(items + item * 8 + 4)
    num_items = tl.load(items + item * 8 + 5)

    row = tl.arange(0, BLOCK_GROUP)
    column = tl.arange(0, BLOCK_DIM)
    head = kv_head * GROUP + row
    inside = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    query = tl.load(q + req * q_stride + head[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0)

    table = req_to_slots + req_row * table_stride
    keys = kv_layer + kv_head * head_stride + column[None, :]
    best = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_GROUP], tl.float32)
    sums = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for block in range(start, end, BLOCK_TOKENS):
        position = block + tl.arange(0, BLOCK_TOKENS)
        # past the end the last token is read again: a cheaper mask, and no unwritten slot's NaN comes in
        slot = tl.load(table + tl.minimum(position, end - 1)).to(tl.int64)
        address = keys + slot[:, None] * slot_stride
        k = load_heads(address, column, HEAD_DIM)
        scores = dot(query, tl.trans(k)) * scale_log2
        scores = tl.where((position < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        decay = tl.exp2(best - higher)
        p = tl.exp2(scores - higher[:, None])
        v = load_heads(address + kv_stride, column, HEAD_DIM)
        denominator = denominator * decay + tl.sum(p, 1)
        sums = dot(p.to(v.dtype), v, sums * decay[:, None])
        best = higher
    attended = sums / tl.where(denominator == 0, 1.0, denominator)[:, None]

    if num_items == 1:
        target = out + (req * NUM_KV_HEADS * GROUP + head[:, None]) * HEAD_DIM + column[None, :]
        tl.store(target, attended.to(out.dtype.element_ty), mask=inside)
    else:
        lse = item.to(tl.int64) * NUM_KV_HEADS * GROUP + head
        tl.store(partial_out + lse[:, None] * HEAD_DIM + column[None, :], attended, mask=inside)
        tl.store(partial_lse + lse, best + tl.log2(denominator), mask=row < GROUP)
        tl.debug_barrier()  # all threads' stores before the one thread's arrival
        arrival = arrivals + req * NUM_KV_HEADS + kv_head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == num_items - 1:
            tl.store(arrival, 0)
            _merge(
                partial_out,
                partial_lse,
                out + (req * NUM_KV_HEADS + kv_head) * (GROUP * HEAD_DIM),
                first_item,
                num_items,
                kv_head,
                NUM_KV_HEADS,
                GROUP,
                HEAD_DIM,
            )


@triton.jit
def load_heads(address, column, HEAD_DIM: tl.constexpr):
    """Load one head's rows; the columns that fill a head up to a power of two are 0."""
    if address.shape[1] == HEAD_DIM:
        return tl.load(address)
    return tl.load(address, mask=(column < HEAD_DIM)[None, :], other=0)


@triton.jit
def _merge(
    partial_out,
    partial_lse,
    out,
    first_item,
    num_items,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Weigh the items of one request and kv head by their softmax denominators and write the group's output."""
    row = tl.arange(0, triton.next_power_of_2(GROUP))
    column = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    inside = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    place = row[:, None] * HEAD_DIM + column[None, :]
    best = tl.full(row.shape, -1e30, tl.float32)  # finite: padding rows must not make NaN
    weights = tl.zeros(row.shape, tl.float32)
    sums = tl.zeros(place.shape, tl.float32)
    for start in range(0, num_items, 8):
        index = start + tl.arange(0, 8)
        line = (first_item + index).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP
        mask = (index < num_items)[:, None] & (row < GROUP)[None, :]
        # .cg: other multiprocessors wrote these, so the first-level cache is no place to look
        lse = tl.load(partial_lse + line[:, None] + row[None, :], mask=mask, other=-1e30, cache_modifier=".cg")
        part = tl.load(
            partial_out + line[:, None, None] * HEAD_DIM + place[None, :, :],
            mask=(index < num_items)[:, None, None] & inside[None, :, :],
            other=0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(best, tl.max(lse, 0))
        weight = tl.exp2(lse - higher[None, :])
        decay = tl.exp2(best - higher)
        weights = weights * decay + tl.sum(weight, 0)
        sums = sums * decay[:, None] + tl.sum(weight[:, :, None] * part, 0)
        best = higher
    tl.store(out + place, (sums / weights[:, None]).to(out.dtype.element_ty), mask=inside)
