"""Padded shapes: which there are, and which of them a batch takes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightserve.kernels.skinny_gemm import MAX_ROWS
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


@pytest.mark.parametrize("num_rows", [1, 4, 16, 32, 64, 65, 1023, 1024, 1025])
@pytest.mark.parametrize("max_tokens", [1, 8, 40, 65, 96, 512, 1023, 1024, 8192])
def test_every_kind_of_product_that_a_step_can_need_is_compiled(num_rows: int, max_tokens: int) -> None:
    shapes = GraphShapes(num_rows, max_tokens)
    needed = {kind_of_product(num_tokens) for num_tokens in range(1, shapes.max_padded_tokens + 1)}
    compiled = [shape for shape in shapes.to_compile if isinstance(shape, ForwardShape)]
    assert {kind_of_product(shape.num_tokens) for shape in compiled} == needed


@pytest.mark.parametrize("num_rows", [1, 64, 1024, 1025])
@pytest.mark.parametrize("max_tokens", [96, 1023, 1024, 8192])
def test_the_largest_shapes_of_each_kind_of_product_are_tried(num_rows: int, max_tokens: int) -> None:
    shapes = GraphShapes(num_rows, max_tokens)
    for kind in ("apart", "fused"):
        tried, captured = (
            [
                shape.num_tokens
                for shape in of
                if isinstance(shape, ForwardShape) and kind_of_product(shape.num_tokens) == kind
            ]
            for of in (shapes.largest, shapes.all)
        )
        assert max(tried, default=0) == max(captured, default=0)
    assert kind_of_product(shapes.largest_apart.num_tokens) == "apart"


def kind_of_product(num_tokens: int) -> str:
    """Name the kernels of gate and up, and of other products."""
    if num_tokens <= MAX_ROWS:
        return "one row" if num_tokens == 1 else f"few rows, in tiles of {max(16, 1 << (num_tokens - 1).bit_length())}"
    return "apart" if num_tokens < FUSED_ROWS else "fused"


def prompt_beside(num_decode: int) -> HostBatch:
    extend_lens = np.array([1] * num_decode + [2000], dtype=np.int32)
    ids = np.zeros(extend_lens.sum(), dtype=np.int32)
    return HostBatch(num_decode, extend_lens * 0, extend_lens * 0, extend_lens, extend_lens > 0, ids, ids)
