"""gemv against its reference."""

import pytest
import torch

from lightserve.kernels.gemv import gemv, gemv_reference
from tests.kernels.kit import DTYPES, assert_close, poisoned, randn, sparse

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


@pytest.mark.parametrize(
    ("x", "weight", "bias", "out", "text"),
    [
        (randn(2, 64), randn(8, 64), None, None, r"x of shape \(2, 64\) must be of shape \(1, 64\)"),
        (sparse(randn(1, 64)), randn(8, 64), None, None, r"x with strides \(128, 2\) must be contiguous"),
        (randn(1, 64), randn(8, 63), None, None, r"weight of shape \(8, 63\) must be of shape \(8, 64\)"),
        (randn(1, 64), randn(8, 64), randn(7), None, r"bias of shape \(7,\) must be of shape \(8,\)"),
        (randn(1, 64), randn(8, 64), None, randn(1, 7), r"out of shape \(1, 7\) must be of shape \(1, 8\)"),
    ],
)
def test_what_does_not_fit_is_named(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        gemv(x, weight, bias, out=out)


def test_a_gated_weight_without_two_halves_or_with_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight of shape \(7, 64\) must have two halves"):
        gemv(randn(1, 64), randn(7, 64), gated=True)
    with pytest.raises(ValueError, match=r"bias of shape \(4,\) must not be given"):
        gemv(randn(1, 64), randn(8, 64), randn(4), gated=True)
