"""Requests in rows, and plans of one step for them."""

from lightserve.ipc.messages import NewReq, StepPlan, pack_int32
from lightserve.model_worker.req_rows import ReqRows
from lightserve.sampling_params import SamplingParams
from tests.model_worker.tiny_engine import CPU


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
