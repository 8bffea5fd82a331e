"""Attention of one query token per request over its slots (TokenAttention's decode step).

    out[i, h] = softmax(scale · q[i, h] · Kᵀ) · V,  K and V of request i at req_to_slots[req_rows[i], :seq_lens[i]]

Requests are cut into items first, see ``decode_plan.py``. One program per item and pack of kv heads (one head, or two
narrow ones): the query heads of the pack share each K and V that the program gathers through the Token Table. In a pack
of two, a query head's row is zero in the other head's columns, so one product serves both. The program that ends a
request's last item merges the items' partial results; where requests are so few that all are cut, a second kernel does
it, all heads at once. Scores, softmax and sums in float32.

With a ``Rotation`` q is all of qkv, as the projection leaves it: each program rotates its queries, and the one with a
request's last tokens also rotates the new key and writes it and its value to their slot, before it reads them with the
others. That spares a step of decode rows the launch of ``rope_kv_write``.
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.attention import LOG2_E, attend_reference, load_heads
from lightserve.kernels.checks import check_contiguous
from lightserve.kernels.decode_plan import DecodePlan, LaunchRule, heads_per_pack, launch_rule, load_item, plan_decode
from lightserve.kernels.dot import dot
from lightserve.kernels.launch import dependent_launch, prefetch, wait_for_previous
from lightserve.kernels.rope_kv_write import Rotation, rope_kv_write_reference, rotate


def decode_attention_reference(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    req_to_slots: torch.Tensor,
    req_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    rotation: Rotation | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what ``decode_attention`` does, in plain torch."""
    if rotation is not None:
        q = _rotate_reference(q, kv_layer, req_to_slots, req_rows, seq_lens, rotation)
    out = q.new_zeros(len(seq_lens), *q.shape[1:]) if out is None else out
    for i, (req_row, seq_len) in enumerate(zip(req_rows.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_slots[req_row, :seq_len].long()
        out[i] = attend_reference(q[i : i + 1], kv_layer[slots], scale)[0] if seq_len else 0
    return out


def _rotate_reference(
    qkv: torch.Tensor,
    kv_layer: torch.Tensor,
    req_to_slots: torch.Tensor,
    req_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    rotation: Rotation,
) -> torch.Tensor:
    """Write the new keys and values of requests that are there; give their queries."""
    num_kv_heads, head_dim = kv_layer.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    present = torch.nonzero(seq_lens).flatten()
    positions = seq_lens[present] - 1
    slots = req_to_slots[req_rows[present].long(), positions.long()]
    q = qkv.new_empty(len(qkv), num_heads, head_dim)
    q[present] = rope_kv_write_reference(qkv[present], rotation, positions, slots, kv_layer, num_heads=num_heads)
    return q


def decode_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    req_to_slots: torch.Tensor,
    req_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    rotation: Rotation | None = None,
    plan: DecodePlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with one query token per request.

    Args:
        q: [num_reqs, num_heads, head_dim]; each request's heads contiguous. With a rotation [num_reqs, (num_heads + 2 ·
            num_kv_heads) · head_dim]: queries, keys, values, not yet rotated. Padding rows at the end may be missing.
        kv_layer: [num_slots, 2, num_kv_heads, head_dim], one layer of the cache; a slot's heads contiguous. With a
            rotation it is changed at each request's last slot.
        req_to_slots: [num_rows, width] int32, the Token Table; written before the plan was made.
        req_rows: [num_reqs] int32.
        seq_lens: [num_reqs] int32; 0 (a padding row) gives zeros.
        scale: Of the scores, before the softmax.
        rotation: What is to be done to queries and keys first; not given: it has been done, and K and V are written.
        plan: ``plan_decode`` of the same ``req_rows`` and ``seq_lens``; made when not given.
        out: [num_reqs, num_heads, head_dim] contiguous; made when not given.

    Raises:
        ValueError: The shapes do not fit.
    """
    num_reqs, num_kv_heads, head_dim = len(seq_lens), *kv_layer.shape[2:]
    if rotation is not None:
        q = _queries_of(q, kv_layer, rotation)
    num_heads = q.shape[1]
    if num_heads % num_kv_heads or q.shape[2] != head_dim:
        raise ValueError(f"q {tuple(q.shape)} does not fit kv_layer {tuple(kv_layer.shape)}")
    if q.stride()[1:] != (head_dim, 1) or kv_layer.stride()[2:] != (head_dim, 1) or req_to_slots.stride(1) != 1:
        raise ValueError("the heads of q and of kv_layer and a row of req_to_slots must be contiguous")
    out = q.new_empty(num_reqs, num_heads, head_dim) if out is None else out
    check_contiguous((num_reqs, num_heads, head_dim), out=out)
    if num_reqs == 0:
        return out
    if plan is None:
        plan = plan_decode(req_rows, seq_lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    pack = heads_per_pack(num_heads, num_kv_heads, head_dim)
    rows = pack * num_heads // num_kv_heads
    rule = launch_rule(num_reqs, num_kv_heads // pack, q.device)
    block_dim = triton.next_power_of_2(pack * head_dim)
    merge_later = 2 * num_reqs <= plan.items.shape[0]
    _decode_attention_kernel[(plan.items.shape[0] * num_kv_heads // pack,)](
        q,
        kv_layer,
        req_to_slots,
        out,
        plan.items,
        plan.partial_out,
        plan.partial_lse,
        plan.arrivals,
        *_rotation_arguments(rotation, q),
        scale * LOG2_E,
        q.stride(0),
        *kv_layer.stride()[:2],
        req_to_slots.stride(0),
        NUM_PACKS=num_kv_heads // pack,
        ROWS=rows,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PACK_DIM=pack * head_dim,
        BLOCK_ROWS=max(triton.next_power_of_2(rows), 16),  # tl.dot takes no fewer
        BLOCK_DIM=block_dim,
        BLOCK_TOKENS=_block_tokens(rule, block_dim * kv_layer.itemsize),
        ROTATE=rotation is not None,
        NORM=rotation is not None and rotation.q_norm is not None,
        MERGE=not merge_later,
        num_warps=rule.num_warps,
        num_stages=rule.num_stages,
        **dependent_launch(q),
    )
    if merge_later:
        _merge_kernel[(num_reqs, num_heads)](
            plan.requests,
            plan.partial_out,
            plan.partial_lse,
            out,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            num_warps=4,
            **dependent_launch(q),
        )
    return out


def _queries_of(qkv: torch.Tensor, kv_layer: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Give the queries of ``qkv``: a view, [num_reqs, num_heads, head_dim]."""
    num_kv_heads, head_dim = kv_layer.shape[2:]
    if qkv.dim() != 2 or qkv.shape[1] % head_dim or rotation.cos_sin.shape[1] != head_dim:
        cos_sin = tuple(rotation.cos_sin.shape)
        raise ValueError(f"qkv {tuple(qkv.shape)} must be rows of heads as wide as cos_sin {cos_sin}, {head_dim}")
    heads = qkv.view(len(qkv), -1, head_dim)
    return heads[:, : heads.shape[1] - 2 * num_kv_heads]


def _rotation_arguments(
    rotation: Rotation | None, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Give the kernel's cos_sin, q_norm, k_norm and eps; ``q`` in the place of tensors that it then does not read."""
    if rotation is None:
        return q, q, q, 0.0
    if rotation.q_norm is None or rotation.k_norm is None:
        return rotation.cos_sin, q, q, rotation.eps
    return rotation.cos_sin, rotation.q_norm, rotation.k_norm, rotation.eps


def _block_tokens(rule: LaunchRule, row_bytes: int) -> int:
    """Keep a tile as large in memory whatever a row takes."""
    return max(min(rule.block_tokens, rule.block_tokens * 256 // row_bytes), 16)


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
    cos_sin,
    q_norm,
    k_norm,
    eps,
    scale_log2,
    q_stride,
    slot_stride,
    kv_stride,
    table_stride,
    NUM_PACKS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PACK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    MERGE: tl.constexpr,
    PDL: tl.constexpr,
):
    NUM_HEADS: tl.constexpr = NUM_PACKS * ROWS
    pack = tl.program_id(0) % NUM_PACKS
    index = (tl.program_id(0) // NUM_PACKS).to(tl.int64)
    item = load_item(items, index)
    if item.req < 0:
        wait_for_previous(PDL)
        return
    table = req_to_slots + item.req_row * table_stride
    heads = kv_layer + pack * PACK_DIM
    # The last layer's weights have driven these from the cache: to fetch them saves 0.5 to 1 % of a 1B's step; to fetch
    # K and V as well saves nothing. A line of 128 bytes is 32 slots, and of long items the first 256 are enough.
    prefetch(table + tl.minimum(item.start + tl.arange(0, 8) * 32, tl.maximum(item.end - 1, 0)), PDL)
    if ROTATE:
        angles = cos_sin + tl.maximum(item.seq_len - 1, 0).to(tl.int64) * HEAD_DIM
        prefetch(angles + tl.arange(0, 8) * HEAD_DIM // 8, PDL)
        # like the plan, the table was written at least two kernels ago
        newest_slot = tl.load(table + item.end - 1, mask=item.end > 0, other=0).to(tl.int64)
    wait_for_previous(PDL)

    row = tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DIM)
    head = pack * ROWS + row
    own = (row < ROWS)[:, None] & (column < PACK_DIM)[None, :]
    own = own & ((row // GROUP)[:, None] == (column // HEAD_DIM)[None, :])
    there = own & (item.start < item.end)  # a padding row's query may lie beyond the end of q
    inner = (column % HEAD_DIM)[None, :]
    offset = head[:, None] * HEAD_DIM + inner
    qkv = q + item.req * q_stride
    if ROTATE:
        query = rotate(qkv + head[:, None] * HEAD_DIM, inner, there, angles, q_norm, eps, HEAD_DIM, NORM)
        # no branch: its loads need not wait until it is known whether there is one
        is_newest = (item.end == item.seq_len) & (item.start < item.end)
        target = kv_layer + newest_slot * slot_stride
        keys = qkv + NUM_HEADS * HEAD_DIM
        _write_newest(
            keys, target, kv_stride, pack, is_newest, angles, k_norm, eps, NUM_PACKS, PACK_DIM, HEAD_DIM, NORM
        )
        tl.debug_barrier()  # before any thread of this program reads them below; no other program does
    else:
        query = tl.load(qkv + offset, mask=there, other=0)

    best, denominator, sums = _attend(
        query, heads, table, item.start, item.end, slot_stride, kv_stride, scale_log2, PACK_DIM, BLOCK_TOKENS
    )
    attended = sums / tl.where(denominator == 0, 1.0, denominator)[:, None]

    if item.num_items == 1:
        tl.store(out + item.req * (NUM_HEADS * HEAD_DIM) + offset, attended.to(out.dtype.element_ty), mask=own)
    else:
        tl.store(partial_out + index * (NUM_HEADS * HEAD_DIM) + offset, attended, mask=own)
        tl.store(partial_lse + index * NUM_HEADS + head, best + tl.log2(denominator), mask=row < ROWS)
        if MERGE:
            tl.debug_barrier()  # all threads' stores before the one thread's arrival
            arrival = arrivals + item.req * NUM_PACKS + pack
            if tl.atomic_add(arrival, 1, sem="acq_rel") == item.num_items - 1:
                tl.store(arrival, 0)
                _merge(
                    partial_out,
                    partial_lse,
                    out,
                    item.req,
                    item.first_item,
                    item.num_items,
                    pack * ROWS,
                    ROWS,
                    NUM_HEADS,
                    HEAD_DIM,
                    8,
                )


@triton.jit
def _write_newest(
    keys,
    target,
    kv_stride,
    pack,
    is_newest,
    angles,
    k_norm,
    eps,
    NUM_PACKS: tl.constexpr,
    PACK_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """Rotate a pack's new keys; write them and their values to the slot at ``target``; nothing unless ``is_newest``."""
    kv_head = pack * (PACK_DIM // HEAD_DIM) + tl.arange(0, PACK_DIM // HEAD_DIM)[:, None]
    column = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    inside = (column < HEAD_DIM) & (kv_head >= 0) & is_newest  # kv_head >= 0, always true, makes a row for each head
    keys += kv_head * HEAD_DIM
    value = tl.load(keys + NUM_PACKS * PACK_DIM + column, mask=inside, other=0)
    key = rotate(keys, column, inside, angles, k_norm, eps, HEAD_DIM, NORM)
    target += kv_head * HEAD_DIM + column
    tl.store(target, key, mask=inside)
    tl.store(target + kv_stride, value, mask=inside)


@triton.jit
def _attend(
    query,
    heads,
    table,
    start,
    end,
    slot_stride,
    kv_stride,
    scale_log2,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Attend from each row of ``query`` to positions [start, end), tile by tile.

    Returns:
        Of each row the highest score, to base 2; the softmax denominator relative to it; the sum of V to divide by it.
    """
    column = tl.arange(0, query.shape[1])
    best = tl.full([query.shape[0]], float("-inf"), tl.float32)
    denominator = tl.zeros([query.shape[0]], tl.float32)
    sums = tl.zeros(query.shape, tl.float32)
    for block in range(start, end, BLOCK_TOKENS):
        position = block + tl.arange(0, BLOCK_TOKENS)
        # past the end the last token is read again: a cheaper mask, and no unwritten slot's NaN comes in
        slot = tl.load(table + tl.minimum(position, end - 1)).to(tl.int64)
        address = heads + slot[:, None] * slot_stride + column[None, :]
        k = load_heads(address, column, WIDTH)
        scores = dot(query, tl.trans(k)) * scale_log2
        scores = tl.where((position < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        decay = tl.exp2(best - higher)
        p = tl.exp2(scores - higher[:, None])
        v = load_heads(address + kv_stride, column, WIDTH)
        denominator = denominator * decay + tl.sum(p, 1)
        sums = dot(p.to(v.dtype), v, sums * decay[:, None])
        best = higher
    return best, denominator, sums


@triton.jit
def _merge_kernel(
    requests, partial_out, partial_lse, out, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PDL: tl.constexpr
):
    req = tl.program_id(0).to(tl.int64)
    first_item = tl.load(requests + req * 2)
    num_items = tl.load(requests + req * 2 + 1)
    wait_for_previous(PDL)
    if num_items > 1:
        _merge(partial_out, partial_lse, out, req, first_item, num_items, tl.program_id(1), 1, NUM_HEADS, HEAD_DIM, 32)


@triton.jit
def _merge(
    partial_out,
    partial_lse,
    out,
    req,
    first_item,
    num_items,
    first_head,
    HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
):
    """Weigh one request's items by their softmax denominators; write the output of ``HEADS`` heads."""
    row = tl.arange(0, triton.next_power_of_2(HEADS))
    column = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    inside = (row < HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    offset = (first_head + row)[:, None] * HEAD_DIM + column[None, :]
    best = tl.full(row.shape, -1e30, tl.float32)  # finite: padding rows must not make NaN
    weights = tl.zeros(row.shape, tl.float32)
    sums = tl.zeros(offset.shape, tl.float32)
    for start in range(0, num_items, BLOCK_ITEMS):
        index = start + tl.arange(0, BLOCK_ITEMS)
        item_offset = (first_item + index).to(tl.int64) * NUM_HEADS
        mask = (index < num_items)[:, None] & (row < HEADS)[None, :]
        # .cg: other multiprocessors wrote these, so the first-level cache is no place to look
        lse = tl.load(
            partial_lse + item_offset[:, None] + (first_head + row)[None, :],
            mask=mask,
            other=-1e30,
            cache_modifier=".cg",
        )
        part = tl.load(
            partial_out + item_offset[:, None, None] * HEAD_DIM + offset[None, :, :],
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
    target = out + req * (NUM_HEADS * HEAD_DIM) + offset
    tl.store(target, (sums / weights[:, None]).to(out.dtype.element_ty), mask=inside)
