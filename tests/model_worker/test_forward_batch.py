"""Batches: laid out from plans, checked, and cut in two."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightserve.errors import InvariantError
from lightserve.ipc.messages import NewReq, StepPlan, pack_int32
from lightserve.model_worker.forward_batch import ForwardBatch, HostBatch
from lightserve.model_worker.req_rows import ReqRows
from lightserve.sampling_params import SamplingParams

CPU = torch.device("cpu")


def make_rows(lengths: list[int], seq_lens: list[int]) -> ReqRows:
    """Requests of these many ids, of which so many are in the cache."""
    rows = ReqRows(16, 64, CPU)
    for row, length in enumerate(lengths):
        rows.enter(NewReq(row, pack_int32(range(row * 100, row * 100 + length)), length, b"", SamplingParams(5)))
    rows.seq_lens[: len(seq_lens)] = seq_lens
    return rows


def make_plan(decode: list[int], chunks: list[tuple[int, int, int]], num_slots: int | None = None) -> StepPlan:
    num_tokens = len(decode) + sum(length for _, _, length in chunks)
    rows, starts, lens = ([chunk[i] for chunk in chunks] for i in range(3))
    slots = range(500, 500 + (num_tokens if num_slots is None else num_slots))
    return StepPlan(
        3, b"", [], pack_int32(decode), pack_int32(rows), pack_int32(starts), pack_int32(lens), pack_int32(slots)
    )


def test_a_mixed_plan_is_laid_out_with_decode_rows_first() -> None:
    rows = make_rows([4, 6, 9, 3], [5, 6, 2, 0])
    rows.next_token[:2] = torch.tensor([77, 78])
    batch = ForwardBatch.of(HostBatch.of(make_plan([1, 0], [(2, 2, 4), (3, 0, 3)]), rows), rows)
    assert batch.token_ids.tolist() == [78, 77, 202, 203, 204, 205, 300, 301, 302]
    assert batch.positions.tolist() == [6, 5, 2, 3, 4, 5, 0, 1, 2]
    assert batch.seq_lens.tolist() == [7, 6, 6, 3]
    assert batch.cu_seqlens.tolist() == [0, 1, 2, 6, 9]
    assert batch.sampled_tokens.tolist() == [0, 1, 8]  # row 2 has more to prefill: it gets no id (H11)
    assert batch.sampled_rows.tolist() == [1, 0, 3]
    assert batch.sampled_positions.tolist() == [7, 6, 3]
    assert rows.req_to_slots[2, 2:6].tolist() == [502, 503, 504, 505]
    assert rows.req_to_slots[1, 6] == 500


def test_a_failed_row_runs_on_some_valid_id() -> None:
    rows = make_rows([4], [4])
    rows.next_token[0] = -1
    batch = ForwardBatch.of(HostBatch.of(make_plan([0], []), rows), rows)
    assert batch.token_ids.tolist() == [0]


def test_cached_slots_stand_in_the_token_table() -> None:
    rows = ReqRows(4, 64, CPU)
    rows.enter(NewReq(2, pack_int32([1, 2, 3, 4]), 4, pack_int32([9, 30]), SamplingParams(5)))
    assert rows.req_to_slots[2, :2].tolist() == [9, 30]
    batch = HostBatch.of(make_plan([], [(2, 2, 2)]), rows)
    assert batch.token_ids.tolist() == [3, 4]


def test_plans_that_contradict_the_rows_are_refused() -> None:
    rows = make_rows([4, 60], [0, 60])
    for plan in (
        make_plan([], [(0, 1, 2)]),  # starts where the row does not stand
        make_plan([], [(0, 0, 5)]),  # more ids than the request has
        make_plan([], [(5, 0, 1)]),  # a free row
        make_plan([], [(0, 0, 0)]),  # an empty chunk
        make_plan([1], [(0, 0, 4)], num_slots=3),
    ):
        with pytest.raises(InvariantError):
            HostBatch.of(plan, rows)


def test_a_request_that_outgrows_the_token_table_is_refused() -> None:
    with pytest.raises(InvariantError, match="outgrew"):
        HostBatch.of(make_plan([0], []), make_rows([4], [64]))


def test_taken_foreign_and_free_rows_are_refused() -> None:
    rows = make_rows([4], [0])
    for row in (0, -1, 16):
        with pytest.raises(InvariantError):
            rows.enter(NewReq(row, pack_int32([1]), 1, b"", SamplingParams(5)))
    with pytest.raises(InvariantError):
        rows.release(np.array([1], dtype=np.int32))


@given(
    num_decode=st.integers(0, 5),
    chunks=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), max_size=5),
)
def test_halves_hold_the_same_tokens_and_samples_in_the_same_order(
    num_decode: int, chunks: list[tuple[int, int, bool]]
) -> None:
    lengths = [3] * num_decode + [start + length + (not ends) for start, length, ends in chunks]
    rows = make_rows(lengths, [3] * num_decode + [start for start, _, _ in chunks])
    plan = make_plan(
        list(range(num_decode)), [(num_decode + i, start, length) for i, (start, length, _) in enumerate(chunks)]
    )
    batch = HostBatch.of(plan, rows)
    if batch.num_tokens < 2:
        with pytest.raises(InvariantError):
            batch.halves()
        return
    halves = batch.halves()
    assert abs(halves[0].num_tokens - halves[1].num_tokens) <= 1
    for name in ("token_ids", "out_slots", "positions", "token_rows", "sampled_rows", "sampled_positions"):
        joined = np.concatenate([getattr(half, name) for half in halves])
        assert joined.tolist() == getattr(batch, name).tolist(), name
    assert sum(half.num_decode for half in halves) == num_decode
    assert all((half.extend_lens > 0).all() for half in halves)
