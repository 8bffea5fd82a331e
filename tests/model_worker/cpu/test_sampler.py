"""The sampler: each row by its own request's parameters."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from lightserve.ipc.messages import NewReq, StepPlan, pack_int32
from lightserve.model_worker.cpu.forward_batch import ForwardBatch
from lightserve.model_worker.cpu.sampler import Sampler
from lightserve.model_worker.host_batch import HostBatch
from lightserve.model_worker.req_rows import ReqRows
from lightserve.sampling_params import SamplingParams

VOCAB, EOS = 40, (2, 3)
GREEDY = SamplingParams(10, temperature=0.0)
CPU = torch.device("cpu")


class Rows:
    """Requests whose prompts are prefilled in one step, then decoded with logits that the test gives."""

    def __init__(self, *reqs: tuple[list[int], SamplingParams], output_len: int = 0) -> None:
        self.rows = ReqRows(8, 64, CPU)
        self.sampler = Sampler(8, VOCAB, EOS)
        self.new_reqs = [
            NewReq(row, pack_int32(ids), len(ids) - output_len, b"", params) for row, (ids, params) in enumerate(reqs)
        ]
        for req in self.new_reqs:
            self.rows.enter(req)
        self.sampler.enter(self.new_reqs)
        self.is_prefilled = False

    def step(self, logits: torch.Tensor) -> list[int]:
        batch = ForwardBatch.of(HostBatch.of(self._plan(), self.rows), self.rows)
        token_ids, _ = self.sampler.sample(logits, batch, self.rows)
        self.rows.seq_lens[batch.host.req_rows] = batch.host.seq_lens
        self.is_prefilled = True
        return token_ids.tolist()

    def _plan(self) -> StepPlan:
        rows = list(range(len(self.new_reqs)))
        lens = [self.rows.num_ids(row) for row in rows]
        if self.is_prefilled:
            return StepPlan(1, b"", [], pack_int32(rows), b"", b"", b"", pack_int32(rows))
        chunks = (pack_int32(rows), pack_int32([0] * len(rows)), pack_int32(lens))
        return StepPlan(0, b"", [], b"", *chunks, pack_int32(range(sum(lens))))


def params(**changes: Any) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **changes)


def logits_of(**by_id: float) -> torch.Tensor:
    row = torch.zeros(1, VOCAB)
    for name, value in by_id.items():
        row[0, int(name[1:])] = value
    return row


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output_once() -> None:
    rows = Rows(([5, 5], params(repetition_penalty=1.3)))
    assert rows.step(logits_of(_5=1.30, _6=1.01)) == [6]  # 1.30 / 1.3 = 1.00, once although 5 came twice
    assert rows.step(logits_of(_5=1.30, _6=1.30, _7=1.01)) == [7]  # 6 counts as output
    low = torch.full((1, VOCAB), -9.0)
    low[0, 5], low[0, 8] = -1.0, -1.2
    assert rows.step(low) == [8]  # -1 * 1.3 is less than -1.2


def test_presence_counts_output_only_and_once() -> None:
    rows = Rows(([5, 5], params(presence_penalty=0.5)))
    assert rows.step(logits_of(_5=1.0)) == [5]  # the prompt does not count
    assert rows.step(logits_of(_5=1.6, _6=1.0)) == [5]  # 1.1 is still the greatest
    assert rows.step(logits_of(_5=1.6, _6=1.0)) == [5]  # and twice costs no more
    assert rows.step(logits_of(_5=1.4, _6=1.0)) == [6]


def test_frequency_counts_output_only_and_every_time() -> None:
    rows = Rows(([5, 5], params(frequency_penalty=0.5)))
    assert rows.step(logits_of(_5=1.0)) == [5]
    assert rows.step(logits_of(_5=1.6, _6=1.0)) == [5]  # 1.1
    assert rows.step(logits_of(_5=1.6, _6=1.0)) == [6]  # 0.6


def test_output_of_before_a_pause_counts_as_output() -> None:
    rows = Rows(([5, 6], params(presence_penalty=0.5)), output_len=1)
    assert rows.step(logits_of(_6=1.4, _5=1.0)) == [5]


def test_penalties_of_one_row_leave_the_others_alone() -> None:
    rows = Rows(([5], GREEDY), ([5], params(repetition_penalty=2.0)), ([5], GREEDY))
    logits = logits_of(_5=1.5, _6=1.0).repeat(3, 1)
    assert rows.step(logits) == [5, 6, 5]


def test_a_row_taken_again_does_not_remember_the_last_requests_tokens() -> None:
    rows = Rows(([5], params(presence_penalty=1.0)))
    assert rows.step(logits_of(_6=1.0)) == [6]
    again = NewReq(0, pack_int32([7]), 1, b"", params(presence_penalty=1.0))
    rows.rows.release(np.array([0], dtype=np.int32))
    rows.rows.enter(again)
    rows.sampler.enter([again])
    rows.is_prefilled = False
    assert rows.step(logits_of(_6=1.0)) == [6]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_ends_are_never_sampled_before_min_new_tokens(ignore_eos: bool) -> None:
    rows = Rows(([5], params(min_new_tokens=2, stop_token_ids=(9,), ignore_eos=ignore_eos)), ([5, 6, 7], GREEDY))
    logits = logits_of(_2=5.0, _3=4.0, _9=3.0, _10=1.0).repeat(2, 1)
    assert rows.step(logits) == [10, 2]
    assert rows.step(logits) == [10, 2]
    assert rows.step(logits) == [2, 2]


def test_min_new_tokens_counts_output_of_before_a_pause() -> None:
    rows = Rows(([5, 6, 7], params(min_new_tokens=3)), output_len=2)
    logits = logits_of(_2=5.0, _10=1.0)
    assert rows.step(logits) == [10]
    assert rows.step(logits) == [2]


def test_seeded_rows_draw_the_same_alone_and_in_a_crowd() -> None:
    seeded = msgspec.structs.replace(GREEDY, temperature=1.0, seed=77)
    logits = torch.randn(1, VOCAB)
    alone = Rows(([5, 6], seeded)).step(logits)
    crowd = Rows(([4], params(temperature=2.0)), ([8, 9, 10], GREEDY), ([5, 6], seeded))
    assert crowd.step(torch.cat((torch.randn(2, VOCAB), logits)))[2] == alone[0]
