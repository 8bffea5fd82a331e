"""Attention of one query token per request over its slots (TokenAttention's decode step).

    out[i, h] = softmax(scale · q[i, h] · Kᵀ) · V,  K and V of request i at req_to_slots[req_rows[i], :seq_lens[i]]

Each request's tokens are cut into items of about equal size, so that one long request fills the device as well as many
short ones; ``plan_decode`` does it on the device, once a step for all layers, so that one CUDA graph serves every
length. One program per item and pack of kv heads (one head, or two narrow ones): the query heads of the pack share each
K and V that the program gathers through the Token Table. In a pack of two, a query head's row is zero in the other
head's columns, so one product serves both. The program that ends a request's last item merges the items' partial
results; where requests are so few that all are cut, a second kernel does it, all heads at once. Scores, softmax and
sums in float32.

With a ``Rotation`` q is all of qkv, as the projection leaves it: each program rotates its queries, and the one with a
request's last tokens also rotates the new key and writes it and its value to their slot, before it reads them with the
others. That spares a step of decode rows the launch of ``rope_kv_write``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lightserve.kernels.dot import dot
from lightserve.kernels.launch import dependent_launch, num_multiprocessors, wait_for_previous
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
            first item, its number of items, its length.
        requests: [num_reqs, 2] int32: each request's first item, its number of items.
        partial_out: [max_items, num_heads, head_dim] float32, each item's own attention.
        partial_lse: [max_items, num_heads] float32, log2 of its softmax denominator.
        arrivals: [num_reqs, num_kv_heads] int32, items that are done; zeros between launches.
    """

    items: torch.Tensor
    requests: torch.Tensor
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
    num_packs = num_kv_heads // _heads_per_pack(num_heads, num_kv_heads, head_dim)
    rule = launch_rule(num_reqs, num_packs, device)
    one_wave = rule.programs * num_multiprocessors(device) // num_packs
    # beyond one wave, half as many items again as requests keep the longest from being the last to end
    max_items = max(one_wave, num_reqs * 3 // 2, 1)
    plan = DecodePlan(
        items=torch.empty(max_items, 8, dtype=torch.int32, device=device),
        requests=torch.empty(num_reqs, 2, dtype=torch.int32, device=device),
        partial_out=torch.empty(max_items, num_heads, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(max_items, num_heads, dtype=torch.float32, device=device),
        arrivals=torch.empty(num_reqs, num_kv_heads, dtype=torch.int32, device=device),
    )
    if num_reqs:
        _plan_kernel[(1,)](
            req_rows,
            seq_lens,
            plan.items,
            plan.requests,
            num_reqs,
            max_items,
            _num_filling(num_packs, device),
            CHUNK_STEP=CHUNK_STEP,
            SHORT_CHUNK=SHORT_CHUNK,
            LONG_CHUNK=LONG_CHUNK,
            BLOCK_REQS=triton.next_power_of_2(num_reqs),
            num_warps=4,
            **dependent_launch(seq_lens),
        )
    plan.arrivals.zero_()  # after the plan, and waiting for it: so attention may read the plan before its own wait
    return plan


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
    if num_reqs == 0:
        return out
    if plan is None:
        plan = plan_decode(req_rows, seq_lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    pack = _heads_per_pack(num_heads, num_kv_heads, head_dim)
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
        q if rotation is None else rotation.cos_sin,
        q if rotation is None or rotation.q_norm is None else rotation.q_norm,
        q if rotation is None or rotation.k_norm is None else rotation.k_norm,
        0.0 if rotation is None else rotation.eps,
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


def _heads_per_pack(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Let two narrow heads share a program: half the programs, each reading twice as much in a row."""
    fits = num_kv_heads % 2 == 0 and 2 * num_heads // num_kv_heads <= 16
    return 2 if fits and head_dim <= 64 else 1


LOG2_E = 1.4426950408889634
CHUNK_STEP = 64  # a multiple of every tile
# The fewest tokens worth an item of their own. Where whole requests leave multiprocessors idle, 64 take 0.02 ms less of
# a step of one request than 128, of the 8B and of the 1B. Where they do not, a cut costs a merge, about 3 µs.
SHORT_CHUNK = 64
LONG_CHUNK = 2048


@dataclass(frozen=True)
class LaunchRule:
    """How decode attention is launched.

    Attributes:
        block_tokens: Tokens of a tile.
        num_warps: One spares all barriers.
        num_stages: Two for each tile in flight, one of them for its slots.
        programs: On a multiprocessor at once.
    """

    block_tokens: int
    num_warps: int
    num_stages: int
    programs: int


FEW = LaunchRule(block_tokens=64, num_warps=2, num_stages=7, programs=2)
# 1 warp: 2 take 94 to 98 % of the copy rate at 64 x 2048 and 256 x 512, 1 takes 97 to 100
MANY = LaunchRule(block_tokens=32, num_warps=1, num_stages=7, programs=4)


def launch_rule(num_reqs: int, num_packs: int, device: torch.device) -> LaunchRule:
    """Choose by how well whole requests fill the device."""
    return FEW if num_reqs * num_packs <= 2 * num_multiprocessors(device) else MANY


def _num_filling(num_packs: int, device: torch.device) -> int:
    """Give the number of whole requests that fill the device."""
    return -(-9 * num_multiprocessors(device) // (10 * num_packs))


def _block_tokens(rule: LaunchRule, row_bytes: int) -> int:
    """Keep a tile as large in memory whatever a row takes."""
    return max(min(rule.block_tokens, rule.block_tokens * 256 // row_bytes), 16)


@triton.jit
def _plan_kernel(
    req_rows,
    seq_lens,
    items,
    requests,
    num_reqs,
    max_items,
    num_filling,
    CHUNK_STEP: tl.constexpr,
    SHORT_CHUNK: tl.constexpr,
    LONG_CHUNK: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    PDL: tl.constexpr,
):
    req = tl.arange(0, BLOCK_REQS)
    inside = req < num_reqs
    wait_for_previous(PDL)
    seq_len = tl.load(seq_lens + req, mask=inside, other=0)
    req_row = tl.load(req_rows + req, mask=inside, other=0)
    # the smallest chunk, in steps, that cuts all requests into no more than max_items
    num_present = tl.sum((seq_len > 0).to(tl.int32))
    low = tl.where(num_present < num_filling, SHORT_CHUNK // CHUNK_STEP, LONG_CHUNK // CHUNK_STEP)
    high = tl.maximum(low, tl.cdiv(tl.max(seq_len), CHUNK_STEP))
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(tl.where(inside, _num_items(seq_len, middle * CHUNK_STEP), 0)) <= max_items
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    even = tl.cdiv(seq_len, _num_items(seq_len, high * CHUNK_STEP))
    chunk = tl.maximum(tl.cdiv(even, CHUNK_STEP), 1) * CHUNK_STEP
    num_items = tl.where(inside, _num_items(seq_len, chunk), 0)
    first = tl.cumsum(num_items) - num_items
    tl.store(requests + req * 2, first, mask=inside)
    tl.store(requests + req * 2 + 1, num_items, mask=inside)
    for i in range(0, tl.max(num_items)):
        record = items + (first + i) * 8
        mine = i < num_items
        tl.store(record, req, mask=mine)
        tl.store(record + 1, req_row, mask=mine)
        tl.store(record + 2, i * chunk, mask=mine)
        tl.store(record + 3, tl.minimum((i + 1) * chunk, seq_len), mask=mine)
        tl.store(record + 4, first, mask=mine)
        tl.store(record + 5, num_items, mask=mine)
        tl.store(record + 6, seq_len, mask=mine)
    for start in range(tl.sum(num_items), max_items, BLOCK_REQS):
        tl.store(items + (start + req) * 8, -1, mask=start + req < max_items)


@triton.jit
def _num_items(seq_len, chunk):
    return tl.maximum(tl.cdiv(seq_len, chunk), 1)


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
    pack = tl.program_id(0) % NUM_PACKS
    item = (tl.program_id(0) // NUM_PACKS).to(tl.int64)
    req = tl.load(items + item * 8).to(tl.int64)
    req_row = tl.load(items + item * 8 + 1).to(tl.int64)
    start = tl.load(items + item * 8 + 2)
    end = tl.load(items + item * 8 + 3)
    first_item = tl.load(items + item * 8 + 4)
    num_items = tl.load(items + item * 8 + 5)
    seq_len = tl.load(items + item * 8 + 6)
    if req < 0:
        wait_for_previous(PDL)
        return
    table = req_to_slots + req_row * table_stride
    heads = kv_layer + pack * PACK_DIM
    wait_for_previous(PDL)

    row = tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DIM)
    head = pack * ROWS + row
    own = (row < ROWS)[:, None] & (column < PACK_DIM)[None, :]
    own = own & ((row // GROUP)[:, None] == (column // HEAD_DIM)[None, :])
    there = own & (start < end)  # a padding row's query may lie beyond the end of q
    inner = (column % HEAD_DIM)[None, :]
    place = head[:, None] * HEAD_DIM + inner
    qkv = q + req * q_stride
    if ROTATE:
        angles = cos_sin + tl.maximum(seq_len - 1, 0).to(tl.int64) * HEAD_DIM
        query = rotate(qkv + head[:, None] * HEAD_DIM, inner, there, angles, q_norm, eps, HEAD_DIM, NORM)
        if (end == seq_len) & (start < end):
            kv_head = pack * (PACK_DIM // HEAD_DIM) + tl.arange(0, PACK_DIM // HEAD_DIM)[:, None]
            along = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
            inside = (along < HEAD_DIM) & (kv_head >= 0)  # the second is always true: it makes a row for each head
            keys = qkv + (NUM_PACKS * ROWS + kv_head) * HEAD_DIM
            key = rotate(keys, along, inside, angles, k_norm, eps, HEAD_DIM, NORM)
            value = tl.load(keys + NUM_PACKS * PACK_DIM + along, mask=inside, other=0)
            slot = tl.load(table + end - 1).to(tl.int64)
            target = kv_layer + slot * slot_stride + kv_head * HEAD_DIM + along
            tl.store(target, key, mask=inside)
            tl.store(target + kv_stride, value, mask=inside)
            tl.debug_barrier()  # before any thread of this program reads them below; no other program does
    else:
        query = tl.load(qkv + place, mask=there, other=0)

    best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_ROWS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for block in range(start, end, BLOCK_TOKENS):
        position = block + tl.arange(0, BLOCK_TOKENS)
        # past the end the last token is read again: a cheaper mask, and no unwritten slot's NaN comes in
        slot = tl.load(table + tl.minimum(position, end - 1)).to(tl.int64)
        address = heads + slot[:, None] * slot_stride + column[None, :]
        k = load_heads(address, column, PACK_DIM)
        scores = dot(query, tl.trans(k)) * scale_log2
        scores = tl.where((position < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        decay = tl.exp2(best - higher)
        p = tl.exp2(scores - higher[:, None])
        v = load_heads(address + kv_stride, column, PACK_DIM)
        denominator = denominator * decay + tl.sum(p, 1)
        sums = dot(p.to(v.dtype), v, sums * decay[:, None])
        best = higher
    attended = sums / tl.where(denominator == 0, 1.0, denominator)[:, None]

    if num_items == 1:
        tl.store(out + req * (NUM_PACKS * ROWS * HEAD_DIM) + place, attended.to(out.dtype.element_ty), mask=own)
    else:
        tl.store(partial_out + item * (NUM_PACKS * ROWS * HEAD_DIM) + place, attended, mask=own)
        tl.store(partial_lse + item * (NUM_PACKS * ROWS) + head, best + tl.log2(denominator), mask=row < ROWS)
        if MERGE:
            tl.debug_barrier()  # all threads' stores before the one thread's arrival
            arrival = arrivals + req * NUM_PACKS + pack
            if tl.atomic_add(arrival, 1, sem="acq_rel") == num_items - 1:
                tl.store(arrival, 0)
                _merge(
                    partial_out,
                    partial_lse,
                    out,
                    req,
                    first_item,
                    num_items,
                    pack * ROWS,
                    ROWS,
                    NUM_PACKS * ROWS,
                    HEAD_DIM,
                    8,
                )


@triton.jit
def load_heads(address, column, WIDTH: tl.constexpr):
    """Load rows of ``WIDTH`` elements; the columns that fill them up to a power of two are 0."""
    if address.shape[1] == WIDTH:
        return tl.load(address)
    return tl.load(address, mask=(column < WIDTH)[None, :], other=0)


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
    place = (first_head + row)[:, None] * HEAD_DIM + column[None, :]
    best = tl.full(row.shape, -1e30, tl.float32)  # finite: padding rows must not make NaN
    weights = tl.zeros(row.shape, tl.float32)
    sums = tl.zeros(place.shape, tl.float32)
    for start in range(0, num_items, BLOCK_ITEMS):
        index = start + tl.arange(0, BLOCK_ITEMS)
        line = (first_item + index).to(tl.int64) * NUM_HEADS
        mask = (index < num_items)[:, None] & (row < HEADS)[None, :]
        # .cg: other multiprocessors wrote these, so the first-level cache is no place to look
        lse = tl.load(
            partial_lse + line[:, None] + (first_head + row)[None, :], mask=mask, other=-1e30, cache_modifier=".cg"
        )
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
    target = out + req * (NUM_HEADS * HEAD_DIM) + place
    tl.store(target, (sums / weights[:, None]).to(out.dtype.element_ty), mask=inside)
