"""gemv against its reference."""

import pytest
import torch

from lightserve.kernels.gemv import gemv, gemv_reference
from tests.kernels.kit import DTYPES, assert_close, poisoned, randn

SHAPES = [(1, 1), (5, 64), (16, 256), (37, 576), (50, 1000), (12, 2500)]  # features out, features in


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gemv_equals_its_reference(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = randn(1, k, dtype=dtype), randn(n, k, dtype=dtype), randn(n, dtype=dtype)
    assert_close(gemv(x, weight, out=poisoned(1, n, dtype=dtype)), gemv_reference(x, weight))
    assert_close(gemv(x, weight, bias), gemv_reference(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_gated_weight_gives_half_as_many_features(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = randn(1, k, dtype=dtype), randn(2 * n, k, dtype=dtype) * k**-0.5
    out = poisoned(1, n, dtype=dtype)
    assert_close(gemv(x, weight, gated=True, out=out), gemv_reference(x, weight, gated=True))


def test_more_than_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="one row"):
        gemv(randn(2, 64), randn(8, 64))


def test_a_gated_weight_without_two_halves_is_refused() -> None:
    with pytest.raises(ValueError, match="two halves"):
        gemv(randn(1, 64), randn(7, 64), gated=True)
