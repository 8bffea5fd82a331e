"""Cut decode attention into items, so that one long request fills the device as well as many short ones do.

A request of n tokens becomes ⌈n / chunk⌉ items, as even as multiples of ``CHUNK_STEP`` can be. The chunk is the
smallest that is worth a cut and leaves room for all requests' items; how much room there is depends on how attention is
launched, so the launch rule stands here too. One program does it on the device, once a step for all layers: one CUDA
graph serves every length.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lightserve.kernels.launch import dependent_launch, num_multiprocessors, wait_for_previous


@dataclass(frozen=True)
class DecodePlan:
    """How a step's decode attention is cut into items, and where the items meet.

    Attributes:
        items: [max_items, 8] int32, in each row the numbers of an ``Item`` and one that is not used.
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


def plan_decode_reference(
    req_rows: torch.Tensor, seq_lens: torch.Tensor, *, num_heads: int, num_kv_heads: int, head_dim: int
) -> DecodePlan:
    """Do what ``plan_decode`` does, one request after the other."""
    num_packs = num_kv_heads // heads_per_pack(num_heads, num_kv_heads, head_dim)
    plan, lengths = _empty_plan(seq_lens, num_packs, num_heads, num_kv_heads, head_dim), seq_lens.tolist()
    num_present = sum(length > 0 for length in lengths)
    shortest = SHORT_CHUNK if num_present < _num_filling(len(lengths), num_packs, seq_lens.device) else LONG_CHUNK
    chunks = itertools.count(shortest, CHUNK_STEP)
    chunk = next(chunk for chunk in chunks if sum(_count(length, chunk) for length in lengths) <= len(plan.items))
    items: list[list[int]] = []
    for req, (req_row, length) in enumerate(zip(req_rows.tolist(), lengths, strict=True)):
        even = triton.cdiv(length, _count(length, chunk))
        size = _count(even, CHUNK_STEP) * CHUNK_STEP
        first_item, num_items = len(items), _count(length, size)
        plan.requests[req] = torch.tensor([first_item, num_items])
        for start in range(0, num_items * size, size):
            items.append([req, req_row, start, min(start + size, length), first_item, num_items, length])
    plan.items.fill_(-1)
    plan.items[: len(items), :7] = torch.tensor(items).view(-1, 7)
    plan.arrivals.zero_()
    return plan


def _count(length: int, size: int) -> int:
    """Count the pieces of ``size`` that a length takes, one at least."""
    return max(-(-length // size), 1)


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
    num_packs = num_kv_heads // heads_per_pack(num_heads, num_kv_heads, head_dim)
    plan = _empty_plan(seq_lens, num_packs, num_heads, num_kv_heads, head_dim)
    if num_reqs:
        _plan_decode_kernel[(1,)](
            req_rows,
            seq_lens,
            plan.items,
            plan.requests,
            num_reqs,
            len(plan.items),
            _num_filling(num_reqs, num_packs, seq_lens.device),
            CHUNK_STEP=CHUNK_STEP,
            SHORT_CHUNK=SHORT_CHUNK,
            LONG_CHUNK=LONG_CHUNK,
            BLOCK_REQS=triton.next_power_of_2(num_reqs),
            num_warps=4,
            **dependent_launch(seq_lens),
        )
    plan.arrivals.zero_()  # after the plan, and waiting for it: so attention may read the plan before its own wait
    return plan


def _empty_plan(seq_lens: torch.Tensor, num_packs: int, num_heads: int, num_kv_heads: int, head_dim: int) -> DecodePlan:
    """Make room for a plan."""
    (num_reqs,), device = seq_lens.shape, seq_lens.device
    one_wave = launch_rule(num_reqs, num_packs, device).programs * num_multiprocessors(device) // num_packs
    # beyond one wave, half as many items again as requests keep the longest from being the last to end
    max_items = max(one_wave, num_reqs * 3 // 2, 1)
    return DecodePlan(
        items=torch.empty(max_items, 8, dtype=torch.int32, device=device),
        requests=torch.empty(num_reqs, 2, dtype=torch.int32, device=device),
        partial_out=torch.empty(max_items, num_heads, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(max_items, num_heads, dtype=torch.float32, device=device),
        arrivals=torch.empty(num_reqs, num_kv_heads, dtype=torch.int32, device=device),
    )


CHUNK_STEP = 64  # a multiple of every tile
# The fewest tokens worth an item of their own. Where whole requests leave room for more programs, 64 take 0.02 ms less
# of a step of one request than 128, of the 8B and of the 1B. Where they do not, a cut costs a merge, about 3 µs.
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


# 7 stages take 2 % longer than 5 in all of a step of a 1B's 1 and 8 rows, whose items are a tile or two
FEW = LaunchRule(block_tokens=64, num_warps=2, num_stages=5, programs=2)
SOME = LaunchRule(block_tokens=64, num_warps=2, num_stages=7, programs=2)
# 1 warp: 2 take 94 to 98 % of the copy rate at 64 x 2048 and 256 x 512, 1 takes 97 to 100
MANY = LaunchRule(block_tokens=32, num_warps=1, num_stages=7, programs=4)


def launch_rule(num_reqs: int, num_packs: int, device: torch.device) -> LaunchRule:
    """Choose by how well whole requests fill the device."""
    filled = num_reqs * num_packs / num_multiprocessors(device)
    if filled <= 0.25:  # 8 rows of an 8B, which fill half, take 0.02 ms longer with it
        return FEW
    # 128 tokens, 4 warps and one program would take 16 µs instead of 19 at 16 x 584, but of uneven lengths longer
    return SOME if filled <= 2 else MANY


def heads_per_pack(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Let two narrow heads share a program: half the programs, each reading twice as much in a row."""
    fits = num_kv_heads % 2 == 0 and 2 * num_heads // num_kv_heads <= 16
    return 2 if fits and head_dim <= 64 else 1


def _num_filling(num_reqs: int, num_packs: int, device: torch.device) -> int:
    """Give the number of whole requests that fill the device, as a launch for ``num_reqs`` fills it."""
    programs = launch_rule(num_reqs, num_packs, device).programs * num_multiprocessors(device)
    return -(-9 * programs // (10 * num_packs))


class Item(NamedTuple):
    """A stretch of one request's positions, within a kernel.

    Attributes:
        req: The request; -1: there is no such item.
        req_row: Its row of the Token Table.
        start: The first position.
        end: The one after the last.
        first_item: The request's first item.
        num_items: The request's number of items.
        seq_len: The request's length.
    """

    req: tl.tensor
    req_row: tl.tensor
    start: tl.tensor
    end: tl.tensor
    first_item: tl.tensor
    num_items: tl.tensor
    seq_len: tl.tensor


@triton.jit
def load_item(items, index):
    """Load one of a plan's items."""
    item_ptr = items + index * 8
    req = tl.load(item_ptr).to(tl.int64)
    req_row = tl.load(item_ptr + 1).to(tl.int64)
    return Item(
        req,
        req_row,
        tl.load(item_ptr + 2),
        tl.load(item_ptr + 3),
        tl.load(item_ptr + 4),
        tl.load(item_ptr + 5),
        tl.load(item_ptr + 6),
    )


@triton.jit
def _plan_decode_kernel(
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
        item_ptr = items + (first + i) * 8
        mine = i < num_items
        tl.store(item_ptr, req, mask=mine)
        tl.store(item_ptr + 1, req_row, mask=mine)
        tl.store(item_ptr + 2, i * chunk, mask=mine)
        tl.store(item_ptr + 3, tl.minimum((i + 1) * chunk, seq_len), mask=mine)
        tl.store(item_ptr + 4, first, mask=mine)
        tl.store(item_ptr + 5, num_items, mask=mine)
        tl.store(item_ptr + 6, seq_len, mask=mine)
    for start in range(tl.sum(num_items), max_items, BLOCK_REQS):
        tl.store(items + (start + req) * 8, -1, mask=start + req < max_items)


@triton.jit
def _num_items(seq_len, chunk):
    return tl.maximum(tl.cdiv(seq_len, chunk), 1)
