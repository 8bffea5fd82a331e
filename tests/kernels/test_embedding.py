"""embedding against its reference."""

import pytest
import torch

from lightserve.kernels.embedding import embedding, embedding_reference
from tests.kernels.kit import DTYPES, int32, poisoned, randn, sparse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 97, 576, 4096])
@pytest.mark.parametrize("first_id", [0, 10])
def test_embedding_equals_its_reference(hidden: int, first_id: int, dtype: torch.dtype) -> None:
    table, token_ids = randn(10, hidden, dtype=dtype), int32([0, 9, 10, 19, 20, 3])
    out = embedding(token_ids, table, first_id=first_id, out=poisoned(6, hidden, dtype=dtype))
    assert torch.equal(out, embedding_reference(token_ids, table, first_id=first_id))


def test_the_shards_sum_is_the_whole_table() -> None:
    table, token_ids = randn(20, 64), int32([0, 9, 10, 19])
    halves = embedding(token_ids, table[:10]) + embedding(token_ids, table[10:], first_id=10)
    assert torch.equal(halves, table[token_ids.long()])


def test_no_ids_are_no_work() -> None:
    assert embedding(int32([]), randn(4, 8)).shape == (0, 8)


def test_what_does_not_fit_is_named() -> None:
    ids, table = int32([3, 4]), randn(10, 8)
    with pytest.raises(ValueError, match=r"token_ids with strides \(2,\) must be contiguous"):
        embedding(sparse(ids), table)
    with pytest.raises(ValueError, match=r"table with strides \(16, 2\) must be contiguous"):
        embedding(ids, sparse(table))
    with pytest.raises(ValueError, match=r"out of shape \(1, 8\) must be of shape \(2, 8\)"):
        embedding(ids, table, out=randn(1, 8))
