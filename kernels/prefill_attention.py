"""Causal attention of many query tokens per request over its slots, cached prefix included.

The query tokens of request i are rows [cu_seqlens[i], cu_seqlens[i + 1]) of q and stand at its last positions,
[seq_lens[i] - extend_len, seq_lens[i]); each sees every position up to its own, through the Token Table.

``plan_prefill`` cuts the requests into tiles of query tokens on the device, once a step for all layers. One program per
tile and kv head. Its rows are the tile's tokens times the query heads of the group: they share each K and V, and a short
chunk fills a tile as well as a long one. The tiles with the most keys start first. Keys before the tile's first token need
no mask; the rest take a second loop. Scores, softmax and sums in float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lightserve.kernels.decode_attention import LOG2_E, attend_reference, load_heads
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
        tiles: [max_tiles, 4] int32: row of the Token Table, first row of q, position of that token, number of tokens
            (0: no tile).
    """

    tiles: torch.Tensor


def plan_prefill(
    req_rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
) -> PrefillPlan:
    """Cut the requests into tiles of query tokens, on the device.

    Args:
        req_rows: [num_reqs] int32.
        cu_seqlens: [num_reqs + 1] int32; requests without query tokens are padding.
        seq_lens: [num_reqs] int32, cached prefix included.
        num_tokens: At least ``cu_seqlens[-1]``.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
    """
    (num_reqs,) = seq_lens.shape
    tile_tokens = _tile_tokens(num_heads, num_kv_heads)
    max_tiles = num_reqs + num_tokens // tile_tokens
    plan = PrefillPlan(torch.empty(max_tiles, 4, dtype=torch.int32, device=seq_lens.device))
    if num_reqs:
        _plan_kernel[(1,)](
            req_rows,
            cu_seqlens,
            seq_lens,
            plan.tiles,
            num_reqs,
            max_tiles,
            TILE_TOKENS=tile_tokens,
            BLOCK_REQS=triton.next_power_of_2(num_reqs),
            BLOCK_LEVELS=16,
            num_warps=4,
            **dependent_launch(seq_lens),
        )
    return plan


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
        q: [num_tokens, num_heads, head_dim]; each token's heads contiguous. Rows from ``cu_seqlens[-1]`` on are padding.
        kv_layer: [num_slots, 2, num_kv_heads, head_dim], one layer of the cache.
        req_to_slots: [num_rows, width] int32, the Token Table.
        req_rows: [num_reqs] int32.
        cu_seqlens: [num_reqs + 1] int32, where each request's rows of q begin and end.
        seq_lens: [num_reqs] int32, cached prefix included.
        scale: Of the scores, before the softmax; positive.
        plan: ``plan_prefill`` of the same batch; made when not given.
        out: [num_tokens, num_heads, head_dim] contiguous; made when not given. Padding rows are not written.

    Raises:
        ValueError: The shapes do not fit.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[2]
    if num_heads % num_kv_heads or kv_layer.shape[3] != head_dim:
        raise ValueError(f"q {tuple(q.shape)} does not fit kv_layer {tuple(kv_layer.shape)}")
    if q.stride()[1:] != (head_dim, 1) or kv_layer.stride(3) != 1 or req_to_slots.stride(1) != 1:
        raise ValueError("the heads of q, a head of kv_layer and a row of req_to_slots must be contiguous")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if plan is None:
        plan = plan_prefill(
            req_rows,
            cu_seqlens,
            seq_lens,
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
        )
    if num_tokens == 0 or plan.tiles.shape[0] == 0:
        return out
    _prefill_attention_kernel[(plan.tiles.shape[0] * num_kv_heads,)](
        q,
        kv_layer,
        req_to_slots,
        out,
        plan.tiles,
        scale * LOG2_E,
        q.stride(0),
        *kv_layer.stride()[:3],
        req_to_slots.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_KEYS=BLOCK_KEYS,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        **dependent_launch(q),
    )
    return out


BLOCK_ROWS = 64
BLOCK_KEYS = 64
NUM_WARPS = 4
NUM_STAGES = 3


def _tile_tokens(num_heads: int, num_kv_heads: int) -> int:
    return max(BLOCK_ROWS * num_kv_heads // num_heads, 1)


@triton.jit
def _plan_kernel(
    req_rows,
    cu_seqlens,
    seq_lens,
    tiles,
    num_reqs,
    max_tiles,
    TILE_TOKENS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    BLOCK_LEVELS: tl.constexpr,
    PDL: tl.constexpr,
):
    req = tl.arange(0, BLOCK_REQS)
    inside = req < num_reqs
    wait_for_previous(PDL)
    first_row = tl.load(cu_seqlens + req, mask=inside, other=0)
    extend_len = tl.load(cu_seqlens + req + 1, mask=inside, other=0) - first_row
    cached_len = tl.load(seq_lens + req, mask=inside, other=0) - extend_len
    req_row = tl.load(req_rows + req, mask=inside, other=0)
    num_tiles = tl.cdiv(extend_len, TILE_TOKENS)
    # level by level from every request's last tile, the one with the most keys, to its first
    written = 0
    for start in range(0, tl.max(num_tiles), BLOCK_LEVELS):
        level = start + tl.arange(0, BLOCK_LEVELS)[:, None]
        tile = num_tiles[None, :] - 1 - level  # [BLOCK_LEVELS, BLOCK_REQS]
        exists = tile >= 0
        in_level = tl.sum(exists.to(tl.int32), 1)
        index = written + tl.cumsum(in_level)[:, None] - in_level[:, None] + tl.cumsum(exists.to(tl.int32), 1) - 1
        record = tiles + index * 4
        offset = tile * TILE_TOKENS
        tl.store(record, tl.broadcast_to(req_row[None, :], exists.shape), mask=exists)
        tl.store(record + 1, first_row[None, :] + offset, mask=exists)
        tl.store(record + 2, cached_len[None, :] + offset, mask=exists)
        tl.store(record + 3, tl.minimum(extend_len[None, :] - offset, TILE_TOKENS), mask=exists)
        written += tl.sum(in_level)
    for start in range(written, max_tiles, BLOCK_REQS):
        tl.store(tiles + (start + req) * 4 + 3, 0, mask=start + req < max_tiles)


@triton.jit
def _prefill_attention_kernel(
    q,
    kv_layer,
    req_to_slots,
    out,
    tiles,
    scale_log2,
    q_stride,
    slot_stride,
    kv_stride,
    head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
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
    req_row = tl.load(tile).to(tl.int64)
    first_row = tl.load(tile + 1).to(tl.int64)
    first_position = tl.load(tile + 2)

    row = tl.arange(0, BLOCK_ROWS)
    token = row // GROUP
    column = tl.arange(0, BLOCK_DIM)
    head = kv_head * GROUP + row % GROUP
    inside = (token < num_tokens)[:, None] & (column < HEAD_DIM)[None, :]
    source = q + (first_row + token)[:, None] * q_stride + head[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(source, mask=inside, other=0)

    table = req_to_slots + req_row * table_stride
    keys = kv_layer + kv_head * head_stride + column[None, :]
    position = first_position + token
    end = first_position + num_tokens
    seen_by_all = (first_position + 1) // BLOCK_KEYS * BLOCK_KEYS
    best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_ROWS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for start in range(0, seen_by_all, BLOCK_KEYS):
        slot = tl.load(table + start + tl.arange(0, BLOCK_KEYS)).to(tl.int64)
        address = keys + slot[:, None] * slot_stride
        best, denominator, sums = _attend_tile(
            query, address, kv_stride, column, start, position, scale_log2, best, denominator, sums, HEAD_DIM, False
        )
    for start in range(seen_by_all, end, BLOCK_KEYS):
        # past the end the last token is read again, always masked: no unwritten slot's NaN comes in
        slot = tl.load(table + tl.minimum(start + tl.arange(0, BLOCK_KEYS), end - 1)).to(tl.int64)
        address = keys + slot[:, None] * slot_stride
        best, denominator, sums = _attend_tile(
            query, address, kv_stride, column, start, position, scale_log2, best, denominator, sums, HEAD_DIM, True
        )
    target = out + ((first_row + token)[:, None] * (NUM_KV_HEADS * GROUP) + head[:, None]) * HEAD_DIM + column[None, :]
    tl.store(target, (sums / denominator[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attend_tile(
    query,
    address,
    kv_stride,
    column,
    start,
    position,
    scale_log2,
    best,
    denominator,
    sums,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one tile of keys to the running softmax: best, denominator, sums."""
    k = load_heads(address, column, HEAD_DIM)
    scores = dot(query, tl.trans(k))
    if MASKED:
        key_position = start + tl.arange(0, scores.shape[1])
        scores = tl.where(key_position[None, :] <= position[:, None], scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1) * scale_log2)
    p = tl.exp2(scores * scale_log2 - higher[:, None])
    decay = tl.exp2(best - higher)
    v = load_heads(address + kv_stride, column, HEAD_DIM)
    denominator = denominator * decay + tl.sum(p, 1)
    sums = dot(p.to(v.dtype), v, sums * decay[:, None])
    return higher, denominator, sums
