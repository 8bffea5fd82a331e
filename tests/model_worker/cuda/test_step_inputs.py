"""What a step sends to the device: where it lies, and what pads it."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightserve.ipc.messages import NewReq, pack_int32
from lightserve.model_worker.cuda.step_inputs import (
    ForwardShape,
    SampleShape,
    Sampling,
    StepInputs,
    forward_sections,
    sample_sections,
)
from lightserve.model_worker.host_batch import HostBatch
from lightserve.model_worker.req_rows import ReqRows
from lightserve.model_worker.sampling_rows import SamplingRows
from lightserve.sampling_params import SamplingParams
from tests.kernels.kit import DEVICE

NUM_ROWS, PADDING_SLOT, EOS = 8, 99, (2, 3)
LARGEST = ForwardShape(64, 16, 64)
BATCH = HostBatch(  # rows 4 and 1 decode; rows 0 and 2 prefill, the latter up to its prompt's end
    num_decode=2,
    req_rows=np.array([4, 1, 0, 2], dtype=np.int32),
    starts=np.array([7, 5, 2, 0], dtype=np.int32),
    extend_lens=np.array([1, 1, 3, 2], dtype=np.int32),
    is_sampled=np.array([True, True, False, True]),
    token_ids=np.array([0, 0, 31, 32, 33, 41, 42], dtype=np.int32),
    out_slots=np.array([50, 51, 60, 61, 62, 70, 71], dtype=np.int32),
)


def make_inputs() -> StepInputs:
    return StepInputs(
        NUM_ROWS,
        largest_forward=LARGEST,
        max_sampled=8,
        num_eos_ids=len(EOS),
        padding_slot=PADDING_SLOT,
        device=DEVICE,
    )


def host_words(inputs: StepInputs) -> torch.Tensor:
    return torch.full((inputs.num_words,), -7, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")


def test_a_batch_arrives_padded_with_tokens_that_touch_no_request() -> None:
    inputs, shape = make_inputs(), ForwardShape(10, 4, 64)
    pinned = host_words(inputs)
    end = inputs.stage_forward(pinned.numpy(), BATCH, shape)
    inputs.copy(pinned, inputs.base, end)
    words, sections = inputs.forward(shape), forward_sections(shape)
    assert words[sections.given_ids].tolist() == [-1, -1, 31, 32, 33, 41, 42, 0, 0, 0]
    assert words[sections.token_rows].tolist() == [4, 1, 0, 0, 0, 2, 2, NUM_ROWS, NUM_ROWS, NUM_ROWS]
    assert words[sections.positions].tolist() == [7, 5, 2, 3, 4, 0, 1, 0, 0, 0]
    assert words[sections.out_slots].tolist() == [50, 51, 60, 61, 62, 70, 71, *[PADDING_SLOT] * 3]
    assert words[sections.decode_rows].tolist() == [4, 1, NUM_ROWS, NUM_ROWS]
    assert words[sections.decode_lens].tolist() == [8, 6, 0, 0]
    assert words[sections.chunk_rows][:3].tolist() == [0, 2, NUM_ROWS]
    assert words[sections.chunk_lens][:3].tolist() == [5, 2, 0]
    assert words[sections.chunk_bounds].tolist() == [2, 5, 7, *[7] * 62]


def test_sampling_finds_each_rows_parameters_and_ids_that_may_not_end_it_yet() -> None:
    inputs, rows, params = make_inputs(), ReqRows(NUM_ROWS, 64, torch.device("cpu")), SamplingRows(NUM_ROWS, EOS)
    drawn = SamplingParams(9, temperature=0.5, top_k=7, top_p=0.75, seed=(1 << 62) + 1)
    short = SamplingParams(9, temperature=0.0, min_new_tokens=5, stop_token_ids=(11,), presence_penalty=0.25)
    for row, sampling in {4: drawn, 1: short, 2: SamplingParams(9, temperature=0.0)}.items():
        rows.enter(req := NewReq(row, pack_int32(range(2)), 2, b"", sampling))
        params.enter(req)
    shape = SampleShape(4, Sampling.ADJUST)
    pinned = host_words(inputs)
    start = inputs.stage_sampling(pinned.numpy(), BATCH, shape, params, rows, 1)
    inputs.copy(pinned, start, inputs.base)
    words, sections = inputs.sample(shape), sample_sections(shape, inputs.forbidden_width)
    assert words[sections.sampled_tokens].tolist() == [0, 1, 6, 0]
    assert words[sections.sampled_rows].tolist() == [4, 1, 2, NUM_ROWS]
    assert words[sections.result_row].tolist() == [1]
    assert words[sections.sampled_positions].tolist() == [8, 6, 2, 0]
    assert words[sections.temperature].view(torch.float32).tolist() == [0.5, 0, 0, 0]
    assert words[sections.top_k].tolist() == [7, 0, 0, 0]
    assert words[sections.top_p].view(torch.float32).tolist() == [0.75, 1, 1, 1]
    assert words[sections.seeds].view(torch.int64).tolist() == [(1 << 62) + 1, 0, 0, 0]
    assert words[sections.presence].view(torch.float32).tolist() == [0, 0.25, 0, 0]
    forbidden = words[sections.forbidden_ids].view(4, -1)
    assert forbidden[1, :4].tolist() == [2, 3, 11, -1]
    assert (forbidden[[0, 2, 3]] == -1).all()


@given(st.integers(1, 2000), st.integers(0, 1100), st.integers(0, 8), st.sampled_from(Sampling))
def test_sections_are_aligned_and_do_not_meet(tokens: int, decode: int, launches: int, sampling: Sampling) -> None:
    forward = forward_sections(ForwardShape(tokens, decode, 64 * launches))
    sample = sample_sections(SampleShape(tokens, sampling), 68)
    for sections in (forward, sample):
        slices = [getattr(sections, name) for name in sections.__dataclass_fields__]
        assert all(section.start % 4 == 0 for section in slices)
        assert all(before.stop <= after.start for before, after in pairwise(slices))
        assert slices[-1].stop <= sections.num_words
    assert sample.num_words % 4 == 0
