"""skinny_gemm against its reference."""

import pytest
import torch

from lightserve.kernels.skinny_gemm import TileRule, _launch, skinny_gemm, skinny_gemm_reference
from tests.kernels.kit import DTYPES, assert_close, poisoned, randn, sparse


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return randn(m, k, dtype=dtype), randn(n, k, dtype=dtype) * k**-0.5, randn(n, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [0, 1, 2, 33, 64])
@pytest.mark.parametrize("shape", [(1, 1), (97, 131), (192, 576)])
def test_skinny_gemm_equals_its_reference(m: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias = operands(m, *shape, dtype)
    out = poisoned(m, shape[0], dtype=dtype)
    assert_close(skinny_gemm(x, weight, out=out), skinny_gemm_reference(x, weight))
    assert_close(skinny_gemm(x, weight, bias), skinny_gemm_reference(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [2, 33, 64])
@pytest.mark.parametrize("shape", [(2, 1), (98, 131), (384, 576)])
def test_a_gated_weight_gives_half_as_many_features(m: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, _ = operands(m, *shape, dtype)
    out = poisoned(m, shape[0] // 2, dtype=dtype)
    assert_close(skinny_gemm(x, weight, gated=True, out=out), skinny_gemm_reference(x, weight, gated=True))


@pytest.mark.parametrize("split_k", [1, 2, 3])
@pytest.mark.parametrize("k", [100, 512])
def test_parts_of_k_are_summed_once_and_again_in_the_next_launch(k: int, split_k: int) -> None:
    x, weight, bias = operands(5, 70, k, torch.float32)
    rule = TileRule(block_n=32, block_k=64, split_k=split_k, num_warps=4, num_stages=2)
    for _ in range(2):
        out = poisoned(5, 70, dtype=torch.float32)
        _launch(x, weight, bias, out, rule, gated=False)
        assert_close(out, skinny_gemm_reference(x, weight, bias))


@pytest.mark.parametrize(
    ("x", "weight", "bias", "out", "text"),
    [
        (randn(65, 8), randn(4, 8), None, None, r"x of shape \(65, 8\) must have at most 64 rows"),
        (sparse(randn(2, 8)), randn(4, 8), None, None, r"x with strides \(16, 2\) must have contiguous rows"),
        (randn(2, 8), randn(4, 7), None, None, r"weight of shape \(4, 7\) must be of shape \(4, 8\)"),
        (randn(2, 8), sparse(randn(4, 8)), None, None, r"weight with strides \(16, 2\) must be contiguous"),
        (randn(2, 8), randn(4, 8), randn(3), None, r"bias of shape \(3,\) must be of shape \(4,\)"),
        (randn(2, 8), randn(4, 8), None, randn(2, 3), r"out of shape \(2, 3\) must be of shape \(2, 4\)"),
    ],
)
def test_what_does_not_fit_is_named(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        skinny_gemm(x, weight, bias, out=out)


def test_a_gated_weight_without_two_halves_or_with_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight of shape \(7, 64\) must have two halves"):
        skinny_gemm(randn(2, 64), randn(7, 64), gated=True)
    with pytest.raises(ValueError, match=r"bias of shape \(4,\) must not be given"):
        skinny_gemm(randn(2, 64), randn(8, 64), randn(4), gated=True)
