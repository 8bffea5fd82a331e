"""Batches: laid out from plans, checked, and cut in two."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightserve.errors import InvariantError
from lightserve.ipc.messages import NewReq, pack_int32
from lightserve.model_worker.host_batch import HostBatch
from lightserve.model_worker.req_rows import ReqRows
from lightserve.sampling_params import SamplingParams
from tests.model_worker.tiny_engine import CPU
from tests.model_worker.tiny_plans import make_plan, make_rows


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
