"""The CPU's attention against the kernels' references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightserve.ipc.messages import NewReq, StepPlan, pack_int32
from lightserve.kernels.attention import attend_reference
from lightserve.model_worker.cpu.attention import attend, plan_attention
from lightserve.model_worker.cpu.decode_attention import AttentionShape, group_by_length
from lightserve.model_worker.cpu.forward_batch import ForwardBatch
from lightserve.model_worker.host_batch import HostBatch
from lightserve.model_worker.req_rows import ReqRows
from lightserve.sampling_params import SamplingParams

CPU = torch.device("cpu")
NUM_SLOTS, NUM_ROWS, MAX_LEN = 4000, 40, 512
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}
HEADS = [(9, 3, 64), (32, 8, 16), (4, 4, 32), (7, 1, 16)]


def make_batch(decode_lens: list[int], chunks: list[tuple[int, int]]) -> ForwardBatch:
    """Rows of these lengths before the step, each in scattered slots; chunks are (start, length)."""
    rows = ReqRows(NUM_ROWS, MAX_LEN, CPU)
    free = torch.randperm(NUM_SLOTS - 1, generator=torch.Generator().manual_seed(0)).int()
    starts = decode_lens + [start for start, _ in chunks]
    extend_lens = [1] * len(decode_lens) + [length for _, length in chunks]
    for row, (start, extend_len) in enumerate(zip(starts, extend_lens, strict=True)):
        rows.enter(NewReq(row, pack_int32([0] * (start + extend_len)), 1, b"", SamplingParams(1)))
        rows.seq_lens[row] = start
        rows.req_to_slots[row] = NUM_SLOTS - 1  # stale: the last usable slot holds NaN
        rows.req_to_slots[row, :start], free = free[:start], free[start:]
    num_decode = len(decode_lens)
    plan = StepPlan(
        0,
        b"",
        [],
        pack_int32(range(num_decode)),
        pack_int32(range(num_decode, len(starts))),
        pack_int32(starts[num_decode:]),
        pack_int32(extend_lens[num_decode:]),
        pack_int32(free[: sum(extend_lens)]),
    )
    return ForwardBatch.of(HostBatch.of(plan, rows), rows)


def check(batch: ForwardBatch, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim = heads
    torch.manual_seed(0)
    kv_layer = torch.randn(NUM_SLOTS + 1, 2, num_kv_heads, head_dim).to(dtype)
    kv_layer[NUM_SLOTS - 1], kv_layer[NUM_SLOTS] = float("nan"), 0
    q = torch.randn(batch.host.num_tokens, num_heads, head_dim).to(dtype)
    found = attend(q, kv_layer, plan_attention(batch, AttentionShape(*heads, NUM_SLOTS, dtype)))
    bounds = batch.cu_seqlens.tolist()
    for index, (req_row, seq_len) in enumerate(zip(batch.req_rows.tolist(), batch.seq_lens.tolist(), strict=True)):
        tokens = slice(bounds[index], bounds[index + 1])
        kv = kv_layer[batch.req_to_slots[req_row, :seq_len].long()]
        expected = attend_reference(q[tokens], kv, head_dim**-0.5)
        torch.testing.assert_close(found[tokens].float(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS)
def test_decode_rows_of_many_lengths_equal_the_reference(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(make_batch([3, 200, 17, 0, 16, 411, 15, 1, 31], []), heads, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS)
def test_mixed_batches_equal_the_reference(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(make_batch([40, 3], [(0, 1), (0, 37), (5, 1), (64, 20)]), heads, dtype)


def test_a_request_as_long_as_the_token_table_equals_the_reference() -> None:
    check(make_batch([MAX_LEN - 1, MAX_LEN - 2], []), HEADS[0], torch.float32)


@settings(max_examples=25)
@given(
    decode_lens=st.lists(st.integers(0, 120), max_size=12),
    chunks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=4),
)
def test_any_batch_equals_the_reference(decode_lens: list[int], chunks: list[tuple[int, int]]) -> None:
    if decode_lens or chunks:
        check(make_batch(decode_lens, chunks), (6, 2, 16), torch.float32)


@given(st.lists(st.integers(1, 8000), min_size=1, max_size=64))
def test_groups_hold_rows_of_similar_length(seq_lens: list[int]) -> None:
    seq_lens = sorted(seq_lens, reverse=True)
    starts = group_by_length(seq_lens)
    assert starts[0] == 0
    for start, stop in zip(starts, [*starts[1:], len(seq_lens)], strict=True):
        assert sum(seq_lens[start] - seq_len for seq_len in seq_lens[start:stop]) <= 1000
