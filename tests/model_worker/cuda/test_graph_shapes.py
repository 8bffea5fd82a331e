"""Padded shapes: which there are, and which of them a batch takes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightserve.model_worker.cuda.graph_shapes import GraphShapes, eager_shape, row_sizes
from lightserve.model_worker.cuda.linear import FUSED_ROWS
from lightserve.model_worker.cuda.step_inputs import CHUNKS_PER_LAUNCH, ForwardShape, SampleShape, Sampling
from lightserve.model_worker.host_batch import HostBatch

NUM_ROWS, MAX_TOKENS = 1000, 4096


def make_batch(num_decode: int, chunk_lens: list[int]) -> HostBatch:
    extend_lens = np.array([1] * num_decode + chunk_lens, dtype=np.int32)
    rows, tokens = np.arange(len(extend_lens), dtype=np.int32), np.zeros(extend_lens.sum(), dtype=np.int32)
    return HostBatch(num_decode, rows, np.zeros_like(rows), extend_lens, rows >= 0, tokens, tokens)


batches = st.builds(
    make_batch,
    st.integers(0, NUM_ROWS),
    st.one_of(st.just([]), st.lists(st.integers(1, 60), max_size=100), st.lists(st.integers(1, 3000), max_size=1)),
).filter(lambda batch: 0 < batch.num_tokens <= MAX_TOKENS)


@given(batches)
def test_every_batch_finds_room(batch: HostBatch) -> None:
    shapes = GraphShapes(NUM_ROWS, MAX_TOKENS)
    captured = shapes.forward_of(batch)
    assert captured is None or captured in set(shapes.all)
    shape = captured or eager_shape(batch)
    largest = shapes.largest_forward
    assert batch.num_tokens <= shape.num_tokens <= largest.num_tokens
    assert batch.num_decode <= shape.num_decode <= largest.num_decode
    assert batch.num_chunks <= shape.num_chunks <= largest.num_chunks
    assert shape.num_chunks % CHUNKS_PER_LAUNCH == 0


@given(st.integers(1, NUM_ROWS), st.sampled_from(Sampling))
def test_any_number_of_rows_has_a_captured_shape_that_is_not_much_larger(num_rows: int, sampling: Sampling) -> None:
    shape = GraphShapes(NUM_ROWS, MAX_TOKENS).sample_of(num_rows, sampling)
    assert num_rows <= shape.num_sampled < 2 * num_rows or num_rows == 1
    assert shape.num_sampled - num_rows < 64


@pytest.mark.parametrize("num_rows", [1, 3, 64, 100, 1024, 4000])
def test_sizes_reach_just_beyond_the_most_rows(num_rows: int) -> None:
    sizes = row_sizes(num_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] >= num_rows
    assert all(size < num_rows for size in sizes[:-1])


def test_the_largest_shapes_are_captured_first_of_their_kind() -> None:
    shapes = GraphShapes(NUM_ROWS, MAX_TOKENS)
    captured = list(shapes.all)
    assert len(captured) == len(set(captured)) == shapes.count
    assert set(shapes.largest) <= set(captured)
    assert captured[0] == shapes.largest[0]
    assert SampleShape(1024, Sampling.GREEDY) in captured


@pytest.mark.parametrize("num_rows", [1, 5, 16, 300, 1024])
def test_attention_beside_prompts_is_compiled_for_every_number_of_decode_rows(num_rows: int) -> None:
    shapes = GraphShapes(num_rows, 8192)
    compiled = {shape.num_decode for shape in shapes.to_compile if isinstance(shape, ForwardShape) and shape.num_chunks}
    for num_decode in range(1, num_rows):
        batch = prompt_beside(num_decode)
        assert eager_shape(batch).num_decode in compiled


@pytest.mark.parametrize(("num_rows", "max_tokens"), [(16, 8192), (16, FUSED_ROWS), (1025, 512)])
def test_products_of_many_rows_are_compiled_where_there_can_be_any(num_rows: int, max_tokens: int) -> None:
    compiled = GraphShapes(num_rows, max_tokens).to_compile
    assert max(shape.num_tokens for shape in compiled if isinstance(shape, ForwardShape)) >= FUSED_ROWS


def prompt_beside(num_decode: int) -> HostBatch:
    extend_lens = np.array([1] * num_decode + [2000], dtype=np.int32)
    ids = np.zeros(extend_lens.sum(), dtype=np.int32)
    return HostBatch(num_decode, extend_lens * 0, extend_lens * 0, extend_lens, extend_lens > 0, ids, ids)
