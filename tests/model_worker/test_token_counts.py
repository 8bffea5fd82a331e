"""Counts of what requests have seen."""

import torch

from lightserve.ipc.messages import NewReq, pack_int32
from lightserve.kernels.penalties import IN_PROMPT
from lightserve.model_worker.token_counts import TokenCounts
from lightserve.sampling_params import SamplingParams

PENALISED = SamplingParams(5, presence_penalty=1.0)


def make_counts() -> TokenCounts:
    token_counts = TokenCounts(3, 8, torch.device("cpu"))
    token_counts.counts.fill_(9)  # as memory may be
    return token_counts


def test_a_row_starts_with_the_prompt_and_with_the_output_of_before_a_pause() -> None:
    token_counts = make_counts()
    token_counts.enter(NewReq(1, pack_int32([5, 5, 2, 7, 7]), 3, b"", PENALISED))
    assert token_counts.counts[1].tolist() == [0, 0, IN_PROMPT, 0, 0, IN_PROMPT, 0, 2]
    assert (token_counts.counts[[0, 2, 3]] == 9).all()


def test_a_request_without_penalties_is_not_counted() -> None:
    token_counts = make_counts()
    token_counts.enter(NewReq(1, pack_int32([5]), 1, b"", SamplingParams(5, temperature=0.7)))
    assert (token_counts.counts == 9).all()
