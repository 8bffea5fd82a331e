"""Causal attention of many query tokens per request over its slots, cached prefix included.

The query tokens of request i are rows [cu_seqlens[i], cu_seqlens[i + 1]) of q and stand at its last positions,
[seq_lens[i] - extend_len, seq_lens[i]); each sees every position up to its own, through the Token Table.

``plan_prefill`` cuts the requests into tiles of query tokens on the device, once a step for all layers. One program per
tile and kv head. Its rows are the tile's tokens times the query heads of the group: they share each K and V, and a
short chunk fills a tile as well as a long one. Keys before the tile's first token need no mask; the rest take a second
loop. Scores, softmax and sums in float32.

K and V are read through the Token Table slot by slot, or, where the queries are many for the keys (``gather_len_for``),
copied side by side first so that the tensor memory accelerator feeds the tensor cores: at 8,192 tokens the copy takes
2 % of the time and the products run a quarter faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from lightserve.kernels.attention import LOG2_E, attend_reference, load_heads
from lightserve.kernels.dot import dot
from lightserve.kernels.launch import dependent_launch, wait_for_previous


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


@dataclass(frozen=True)
class PrefillPlan:
    """How a step's prefill attention is cut into tiles.

    Attributes:
        tiles: [max_tiles, 4] int32: row of the Token Table (gathered: of the copy, where the request's keys begin),
            first row of q, position of that token, number of tokens (0: no tile).
        slots: [gather_len] int32, all requests' slots side by side, each filled up to whole tiles of keys with its last
            slot; empty when K and V are not gathered.
    """

    tiles: torch.Tensor
    slots: torch.Tensor


MAX_GATHER_LEN = 32768  # bounds the copy: 128 MiB for 8 kv heads of 128 in bfloat16
MIN_QUERIES_PER_KEY = 200  # below, copying a key (2 ns) costs more than it spares the queries that see it


def gather_len_for(extend_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
    """Give the length of a copy of all requests' K and V, each filled up to whole tiles; 0 where copying does not pay.

    Args:
        extend_lens: Query tokens of each request.
        seq_lens: Keys of each request, at least as many.
    """
    num_keys = sum(triton.cdiv(seq_len, GATHERED_RULE.block_keys) for seq_len in seq_lens) * GATHERED_RULE.block_keys
    num_scores = sum(n * (s - n / 2) for n, s in zip(extend_lens, seq_lens, strict=True))
    return num_keys if num_keys <= MAX_GATHER_LEN and num_scores >= MIN_QUERIES_PER_KEY * num_keys else 0


def plan_prefill(
    req_to_slots: torch.Tensor,
    req_rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    gather_len: int = 0,
) -> PrefillPlan:
    """Cut the requests into tiles of query tokens, on the device.

    Args:
        req_to_slots: [num_rows, width] int32, the Token Table.
        req_rows: [num_reqs] int32.
        cu_seqlens: [num_reqs + 1] int32; requests without query tokens are padding.
        seq_lens: [num_reqs] int32, cached prefix included.
        num_tokens: At least ``cu_seqlens[-1]``.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        gather_len: ``gather_len_for`` to copy K and V side by side first, 0 to read them through the Token Table.
    """
    (num_reqs,) = seq_lens.shape
    rule = GATHERED_RULE if gather_len else SCATTERED_RULE
    tile_tokens = max(rule.block_rows * num_kv_heads // num_heads, 1)
    max_tiles = num_reqs + num_tokens // tile_tokens
    tiles = torch.empty(max_tiles, 4, dtype=torch.int32, device=seq_lens.device)
    slots = torch.empty(gather_len, dtype=torch.int32, device=seq_lens.device)
    first_keys = torch.empty(num_reqs, dtype=torch.int32, device=seq_lens.device)
    if num_reqs:
        _plan_prefill_kernel[(1,)](
            req_rows,
            cu_seqlens,
            seq_lens,
            tiles,
            first_keys,
            num_reqs,
            max_tiles,
            TILE_TOKENS=tile_tokens,
            GATHER=gather_len > 0,
            BLOCK_KEYS=rule.block_keys,
            BLOCK_REQS=triton.next_power_of_2(num_reqs),
            num_warps=4,
            **dependent_launch(seq_lens),
        )
    if gather_len:
        _gather_slots_kernel[(num_reqs, triton.cdiv(gather_len, 1024))](
            req_to_slots,
            req_rows,
            seq_lens,
            first_keys,
            slots,
            req_to_slots.stride(0),
            BLOCK_KEYS=rule.block_keys,
            BLOCK=1024,
            num_warps=4,
            **dependent_launch(seq_lens),
        )
    return PrefillPlan(tiles, slots)


def prefill_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    req_to_slots: torch.Tensor,
    req_rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    plan: PrefillPlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally with each request's last tokens; their K and V are in the cache already.

    Args:
        q: [num_tokens, num_heads, head_dim]; each token's heads contiguous. Rows from ``cu_seqlens[-1]`` on are
            padding.
        kv_layer: [num_slots, 2, num_kv_heads, head_dim], one layer of the cache; a slot contiguous.
        req_to_slots: [num_rows, width] int32, the Token Table.
        req_rows: [num_reqs] int32.
        cu_seqlens: [num_reqs + 1] int32, where each request's rows of q begin and end.
        seq_lens: [num_reqs] int32, cached prefix included.
        scale: Of the scores, before the softmax; positive.
        plan: ``plan_prefill`` of the same batch; made, without gathering, when not given.
        out: [num_tokens, num_heads, head_dim] contiguous; made when not given. Padding rows are not written.

    Raises:
        ValueError: The shapes do not fit.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[2]
    if num_heads % num_kv_heads or kv_layer.shape[3] != head_dim:
        raise ValueError(f"q {tuple(q.shape)} does not fit kv_layer {tuple(kv_layer.shape)}")
    if q.stride()[1:] != (head_dim, 1) or not kv_layer[0].is_contiguous() or req_to_slots.stride(1) != 1:
        raise ValueError("the heads of q, a slot of kv_layer and a row of req_to_slots must be contiguous")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if plan is None:
        plan = plan_prefill(
            req_to_slots,
            req_rows,
            cu_seqlens,
            seq_lens,
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )
    if num_tokens == 0 or plan.tiles.shape[0] == 0:
        return out
    gathered = len(plan.slots) > 0
    rule = GATHERED_RULE if gathered else SCATTERED_RULE
    block_dim = triton.next_power_of_2(head_dim)
    block_keys = _block_keys(rule, block_dim * kv_layer.itemsize)
    _prefill_attention_kernel[(plan.tiles.shape[0] * num_kv_heads,)](
        q,
        _gather(kv_layer, plan.slots, [block_keys, block_dim]) if gathered else kv_layer,
        req_to_slots,
        out,
        plan.tiles,
        scale * LOG2_E,
        q.stride(0),
        kv_layer.stride(0),
        req_to_slots.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        GATHERED=gathered,
        BLOCK_DIM=block_dim,
        BLOCK_ROWS=rule.block_rows,
        BLOCK_KEYS=block_keys,
        num_warps=rule.num_warps if block_dim <= 128 else 8,
        num_stages=rule.num_stages,
        **dependent_launch(q),
    )
    return out


@dataclass(frozen=True)
class LaunchRule:
    """Tile of queries times keys, warps, pipeline stages."""

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int


# Two programs on a multiprocessor, one's softmax under the other's products.
GATHERED_RULE = LaunchRule(block_rows=64, block_keys=64, num_warps=4, num_stages=3)
SCATTERED_RULE = LaunchRule(
    block_rows=64, block_keys=64, num_warps=4, num_stages=5
)  # the slots' loads take every other stage


def _block_keys(rule: LaunchRule, row_bytes: int) -> int:
    """Keep a tile as large in memory whatever a row takes."""
    return max(min(rule.block_keys, rule.block_keys * 256 // row_bytes), 16)


def _gather(kv_layer: torch.Tensor, slots: torch.Tensor, tile: list[int]) -> TensorDescriptor:
    """Copy the slots' K and V side by side; describe the copy by tiles of one head's keys or values."""
    width = kv_layer[0].numel()
    copy = torch.empty(len(slots), width, dtype=kv_layer.dtype, device=kv_layer.device)
    _gather_kv_kernel[(triton.cdiv(len(slots), 4),)](
        kv_layer,
        slots,
        copy,
        len(slots),
        kv_layer.stride(0),
        width,
        BLOCK_SLOTS=4,
        BLOCK_WIDTH=triton.next_power_of_2(width),
        num_warps=8,
        **dependent_launch(kv_layer),
    )
    return TensorDescriptor(copy, [len(slots), width], [width, 1], tile)


@triton.jit
def _plan_prefill_kernel(
    req_rows,
    cu_seqlens,
    seq_lens,
    tiles,
    first_keys,
    num_reqs,
    max_tiles,
    TILE_TOKENS: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    PDL: tl.constexpr,
):
    req = tl.arange(0, BLOCK_REQS)
    inside = req < num_reqs
    wait_for_previous(PDL)
    first_row = tl.load(cu_seqlens + req, mask=inside, other=0)
    extend_len = tl.load(cu_seqlens + req + 1, mask=inside, other=0) - first_row
    seq_len = tl.load(seq_lens + req, mask=inside, other=0)
    source = tl.load(req_rows + req, mask=inside, other=0)
    if GATHER:
        filled_len = tl.cdiv(seq_len, BLOCK_KEYS) * BLOCK_KEYS
        source = tl.cumsum(filled_len) - filled_len
        tl.store(first_keys + req, source, mask=inside)
    num_tiles = tl.cdiv(extend_len, TILE_TOKENS)
    # the request with the most keys first, each from its last tile to its first: no heavy tile is left for the end, and
    # programs that run together read the same keys
    first_tile = tl.zeros([BLOCK_REQS], tl.int32)
    for other in range(0, num_reqs):
        other_len = tl.load(seq_lens + other)
        other_extend = tl.load(cu_seqlens + other + 1) - tl.load(cu_seqlens + other)
        goes_before = (other_len > seq_len) | ((other_len == seq_len) & (other < req))
        first_tile += tl.where(goes_before, tl.cdiv(other_extend, TILE_TOKENS), 0)
    for i in range(0, tl.max(num_tiles)):
        tile_ptr = tiles + (first_tile + i) * 4
        offset = (num_tiles - 1 - i) * TILE_TOKENS
        mine = i < num_tiles
        tl.store(tile_ptr, source, mask=mine)
        tl.store(tile_ptr + 1, first_row + offset, mask=mine)
        tl.store(tile_ptr + 2, seq_len - extend_len + offset, mask=mine)
        tl.store(tile_ptr + 3, tl.minimum(extend_len - offset, TILE_TOKENS), mask=mine)
    for start in range(tl.sum(num_tiles), max_tiles, BLOCK_REQS):
        tl.store(tiles + (start + req) * 4 + 3, 0, mask=start + req < max_tiles)


@triton.jit
def _gather_slots_kernel(
    req_to_slots,
    req_rows,
    seq_lens,
    first_keys,
    slots,
    table_stride,
    BLOCK_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    req = tl.program_id(0)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    seq_len = tl.load(seq_lens + req)
    inside = position < tl.cdiv(seq_len, BLOCK_KEYS) * BLOCK_KEYS
    table = req_to_slots + tl.load(req_rows + req).to(tl.int64) * table_stride
    # past the end the last token is copied again: no unwritten slot's NaN comes in
    slot = tl.load(table + tl.minimum(position, seq_len - 1), mask=inside, other=0)
    tl.store(slots + tl.load(first_keys + req) + position, slot, mask=inside)


@triton.jit
def _gather_kv_kernel(
    kv_layer,
    slots,
    copy,
    num_slots,
    slot_stride,
    width,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = (index < num_slots)[:, None] & (column < width)
    wait_for_previous(PDL)
    slot = tl.load(slots + index, mask=index < num_slots, other=0).to(tl.int64)
    values = tl.load(kv_layer + slot[:, None] * slot_stride + column, mask=inside, other=0)
    tl.store(copy + index.to(tl.int64)[:, None] * width + column, values, mask=inside)


@triton.jit
def _prefill_attention_kernel(
    q,
    kv,
    req_to_slots,
    out,
    tiles,
    scale_log2,
    q_stride,
    slot_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tiles + (tl.program_id(0) // NUM_KV_HEADS) * 4
    wait_for_previous(PDL)
    num_tokens = tl.load(tile + 3)
    if num_tokens == 0:
        return
    source = tl.load(tile)
    first_row = tl.load(tile + 1).to(tl.int64)
    first_position = tl.load(tile + 2)

    row = tl.arange(0, BLOCK_ROWS)
    token = row // GROUP
    column = tl.arange(0, BLOCK_DIM)
    head = kv_head * GROUP + row % GROUP
    inside = (token < num_tokens)[:, None] & (column < HEAD_DIM)[None, :]
    q_ptrs = q + (first_row + token)[:, None] * q_stride + head[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(q_ptrs, mask=inside, other=0)

    table = req_to_slots
    if not GATHERED:
        table += source.to(tl.int64) * table_stride
    position = first_position + token
    end = first_position + num_tokens
    seen_by_all = (first_position + 1) // BLOCK_KEYS * BLOCK_KEYS
    best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_ROWS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for start in range(0, seen_by_all, BLOCK_KEYS):
        if GATHERED:
            k = kv.load([source + start, kv_head * HEAD_DIM])
            v = kv.load([source + start, (NUM_KV_HEADS + kv_head) * HEAD_DIM])
        else:
            slot = tl.load(table + start + tl.arange(0, BLOCK_KEYS)).to(tl.int64)
            address = kv + slot[:, None] * slot_stride + kv_head * HEAD_DIM + column[None, :]
            k = load_heads(address, column, HEAD_DIM)
            v = load_heads(address + NUM_KV_HEADS * HEAD_DIM, column, HEAD_DIM)
        scores = dot(query, tl.trans(k))
        best, denominator, sums = _update_online_softmax(scores, v, scale_log2, best, denominator, sums)
    for start in range(seen_by_all, end, BLOCK_KEYS):
        key_position = start + tl.arange(0, BLOCK_KEYS)
        if GATHERED:
            k = kv.load([source + start, kv_head * HEAD_DIM])
            v = kv.load([source + start, (NUM_KV_HEADS + kv_head) * HEAD_DIM])
        else:
            # past the end the last token is read again: no unwritten slot's NaN comes in
            slot = tl.load(table + tl.minimum(key_position, end - 1)).to(tl.int64)
            address = kv + slot[:, None] * slot_stride + kv_head * HEAD_DIM + column[None, :]
            k = load_heads(address, column, HEAD_DIM)
            v = load_heads(address + NUM_KV_HEADS * HEAD_DIM, column, HEAD_DIM)
        scores = dot(query, tl.trans(k))
        scores = tl.where(key_position[None, :] <= position[:, None], scores, float("-inf"))
        best, denominator, sums = _update_online_softmax(scores, v, scale_log2, best, denominator, sums)
    out_row = (first_row + token)[:, None] * (NUM_KV_HEADS * GROUP) + head[:, None]
    out_ptrs = out + out_row * HEAD_DIM + column[None, :]
    tl.store(out_ptrs, (sums / denominator[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _update_online_softmax(scores, v, scale_log2, best, denominator, sums):
    """Take one tile of keys into the online softmax: the highest score, the denominator and the sum of V so far."""
    higher = tl.maximum(best, tl.max(scores, 1) * scale_log2)
    p = tl.exp2(scores * scale_log2 - higher[:, None])
    decay = tl.exp2(best - higher)
    denominator = denominator * decay + tl.sum(p, 1)
    sums = dot(p.to(v.dtype), v, sums * decay[:, None])
    return higher, denominator, sums
