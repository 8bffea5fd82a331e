"""gemv against its reference."""

import pytest
import torch

from lightserve.kernels.gemv import gemv, gemv_reference
from tests.kernels.kit import DEVICE, DTYPES, assert_close, poisoned, randn, sparse

SHAPES = [(1, 1), (5, 64), (16, 256), (37, 576), (50, 1000), (12, 2500)]  # features out, features in


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gemv_equals_its_reference(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = randn(1, k, dtype=dtype), randn(n, k, dtype=dtype), randn(n, dtype=dtype)
    assert_close(gemv(x, weight, out=poisoned(1, n, dtype=dtype)), gemv_reference(x, weight))
    assert_close(gemv(x, weight, bias), gemv_reference(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_gated_weight_gives_a_feature_for_two_rows(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = randn(1, k, dtype=dtype), randn(n, 2, k, dtype=dtype) * k**-0.5
    out = poisoned(1, n, dtype=dtype)
    assert_close(gemv(x, weight, out=out), gemv_reference(x, weight))


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


def test_a_gated_weight_of_other_than_two_rows_or_with_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight of shape \(7, 1, 64\) must be of shape \(7, 2, 64\)"):
        gemv(randn(1, 64), randn(7, 1, 64))
    with pytest.raises(ValueError, match=r"bias of shape \(4,\) must not be given"):
        gemv(randn(1, 64), randn(4, 2, 64), randn(4))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
def test_gate_and_up_are_told_apart() -> None:
    weight = torch.zeros(3, 2, 8)
    weight[:, 0, 0], weight[:, 1, 0] = torch.tensor([100.0, -100.0, 0.0]), torch.tensor([3.0, 3.0, 3.0])
    x = torch.zeros(1, 8)
    x[0, 0] = 1.0
    assert gemv_reference(x, weight).tolist() == [[300.0, 0.0, 0.0]]
    assert gemv(x.to(DEVICE), weight.to(DEVICE)).tolist() == [[300.0, 0.0, 0.0]]
