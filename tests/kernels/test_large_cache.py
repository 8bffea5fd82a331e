"""A cache of more than 2**31 elements: slots times strides leave 32 bits."""

import torch

from lightserve.kernels.decode_attention import decode_attention, decode_attention_reference
from lightserve.kernels.prefill_attention import (
    GATHERED_RULE,
    plan_prefill,
    prefill_attention,
    prefill_attention_reference,
)
from lightserve.kernels.rope_kv_write import Rotation, rope_kv_write, rope_kv_write_reference
from tests.kernels.kit import DEVICE, assert_close, int32, poisoned, randn

SLOT_ELEMENTS = 2 * 2 * 64
NUM_SLOTS = (1 << 31) // SLOT_ELEMENTS + 100


def large_cache() -> torch.Tensor:
    """Reserve 4 GiB; a CPU's system only gives the pages that are touched."""
    cache = torch.empty(NUM_SLOTS, 2, 2, 64, dtype=torch.float16, device=DEVICE)
    assert cache.numel() > 1 << 31
    return cache


def test_the_last_slots_are_written_and_read_where_they_lie() -> None:
    cache, positions = large_cache(), int32(list(range(70)))
    out_slots = int32(list(range(NUM_SLOTS - 70, NUM_SLOTS)))
    last = cache[NUM_SLOTS - 70 :]
    expected = torch.zeros_like(last)
    qkv, rotation = randn(70, 8 * 64, dtype=torch.float16), Rotation(randn(80, 64))
    q = rope_kv_write(qkv, rotation, positions, out_slots, cache, num_heads=4)
    rope_kv_write_reference(qkv, rotation, positions, positions, expected, num_heads=4)
    assert_close(last, expected)

    table, near, row, seq_len = out_slots.view(1, 70), positions.view(1, 70), int32([0]), int32([70])
    decoded = decode_attention(q[-1:], cache, table, row, seq_len, scale=0.125)
    assert_close(decoded, decode_attention_reference(q[-1:], expected, near, row, seq_len, scale=0.125))
    for gather_len in (0, 2 * GATHERED_RULE.block_keys):
        batch = (table, row, int32([0, 70]), seq_len)
        plan = plan_prefill(*batch, num_tokens=70, num_heads=4, num_kv_heads=2, gather_len=gather_len)
        out = poisoned(70, 4, 64, dtype=torch.float16)
        prefill_attention(q, cache, *batch, scale=0.125, plan=plan, out=out)
        assert_close(out, prefill_attention_reference(q, expected, near, *batch[1:], scale=0.125))
