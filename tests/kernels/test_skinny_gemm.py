"""skinny_gemm against its reference."""

from unittest.mock import Mock

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from lightserve.kernels.launch import has_tma
from lightserve.kernels.normed import Normed, Scaling
from lightserve.kernels.rms_norm import add_rms_norm_reference
from lightserve.kernels.skinny_gemm import (
    TileRule,
    _launch,
    launch_rule,
    skinny_gemm,
    skinny_gemm_add_norm,
    skinny_gemm_add_norm_reference,
    skinny_gemm_reference,
)
from tests.kernels.kit import DEVICE, DTYPES, assert_close, poisoned, randn, sparse


def square_sums(normed: Normed) -> torch.Tensor:
    assert normed.scaling is not None
    return normed.scaling.square_sums.sum(0)


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return randn(m, k, dtype=dtype), randn(n, k, dtype=dtype) * k**-0.5, randn(n, dtype=dtype)


def gated(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(len(weight) // 2, 2, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [0, 1, 2, 33, 64])
@pytest.mark.parametrize("shape", [(1, 1), (97, 131), (192, 576)])
def test_skinny_gemm_equals_its_reference(m: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias = operands(m, *shape, dtype)
    out = poisoned(m, shape[0], dtype=dtype)
    assert_close(skinny_gemm(x, weight, out=out), skinny_gemm_reference(x, weight))
    assert_close(skinny_gemm(x, weight, bias), skinny_gemm_reference(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [2, 32, 33, 64])
@pytest.mark.parametrize("shape", [(2, 1), (98, 131), (384, 576), (384, 640)])
def test_a_gated_weight_gives_a_feature_for_two_rows(m: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, _ = operands(m, *shape, dtype)
    weight, out = gated(weight), poisoned(m, shape[0] // 2, dtype=dtype)
    assert_close(skinny_gemm(x, weight, out=out), skinny_gemm_reference(x, weight))


@pytest.mark.parametrize("by_tma", [False, True])
@pytest.mark.parametrize("m", [5, 40])
@pytest.mark.parametrize("split_k", [1, 2, 3])
@pytest.mark.parametrize("k", [104, 512])
def test_parts_of_k_are_summed_once_and_again_in_the_next_launch(k: int, split_k: int, m: int, by_tma: bool) -> None:
    x, weight, bias = operands(m, 70, k, torch.float16)
    rule = TileRule(block_n=32, block_k=64, split_k=split_k, num_warps=4, num_stages=2, by_tma=by_tma)
    for _ in range(2):
        out = poisoned(m, 70, dtype=torch.float32)
        _launch(x, weight, out, rule, bias=bias)
        assert_close(out, skinny_gemm_reference(x, weight, bias).float(), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(192, 640), (96, 2, 640)])
@pytest.mark.parametrize(
    ("x_width", "x_begin", "weight_begin", "by_tma"),
    [(640, 0, 0, True), (656, 0, 0, True), (641, 0, 0, False), (640, 1, 0, False), (640, 0, 1, False)],
)
def test_many_rows_are_copied_in_tiles_where_they_can_be(
    x_width: int,
    x_begin: int,
    weight_begin: int,
    by_tma: bool,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = randn(40 * x_width + x_begin, dtype=dtype)[x_begin:].view(40, x_width)[:, :640]
    weight = (randn(192 * 640 + weight_begin, dtype=dtype) * 0.04)[weight_begin:].view(shape)
    describe = Mock(wraps=TensorDescriptor.from_tensor)
    monkeypatch.setattr(TensorDescriptor, "from_tensor", describe)
    assert_close(skinny_gemm(x, weight), skinny_gemm_reference(x, weight))
    assert describe.called == (by_tma and has_tma(DEVICE))


@pytest.mark.parametrize("m", [17, 33])
def test_a_wide_weight_has_wide_tiles(m: int) -> None:
    x, weight, _ = operands(m, 16400, 64, torch.bfloat16)
    assert launch_rule(m, 16400, gated=False).block_n == 128
    assert_close(skinny_gemm(x, weight), skinny_gemm_reference(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 33, 64])
@pytest.mark.parametrize("shape", [(97, 131), (192, 576), (96, 2, 576)])
def test_rows_of_a_norm_are_scaled_by_the_square_sums_of_all_its_parts(
    m: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    n, k = shape[0], shape[-1]
    x, weight, bias = randn(m, k, dtype=dtype), randn(*shape, dtype=dtype) * k**-0.5, randn(n, dtype=dtype)
    scaling = Scaling(randn(5, m).square() * k, 0.25)
    out = skinny_gemm(x, weight, scaling=scaling, out=poisoned(m, n, dtype=dtype))
    expected = skinny_gemm_reference(x, weight, scaling=scaling)
    assert_close(out, expected)
    if len(shape) == 2:
        with_bias = skinny_gemm(x, weight, bias, scaling=scaling)
        assert_close(with_bias, expected + bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [0, 1, 2, 33, 64])
@pytest.mark.parametrize("shape", [(1, 1), (97, 131), (192, 576), (576, 1536), (4100, 64)])
def test_a_product_is_added_to_the_residual_and_leaves_the_scaling_of_its_norm(
    m: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    (x, weight, gain), residual = operands(m, *shape, dtype), randn(m, shape[0], dtype=dtype)
    expected_residual = residual.clone()
    expected = skinny_gemm_add_norm_reference(x, weight, expected_residual, gain, 1e-5)
    out = poisoned(m, shape[0], dtype=dtype)
    normed = skinny_gemm_add_norm(x, weight, residual, gain, 1e-5, out=out)
    assert normed.rows is out
    assert_close(residual, expected_residual)
    assert_close(out, expected.rows)
    assert_close(square_sums(normed), square_sums(expected), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 16, 40])
def test_both_halves_of_a_norm_are_the_norm(m: int, dtype: torch.dtype) -> None:
    (x, weight, gain), residual, next_weight = operands(m, 192, 64, dtype), randn(m, 192, dtype=dtype), randn(40, 192)
    expected_residual, next_weight = residual.clone(), next_weight.to(dtype)
    normed = skinny_gemm_add_norm(x, weight, residual, gain, 1e-5)
    out = skinny_gemm(normed.rows, next_weight, scaling=normed.scaling)
    expected = add_rms_norm_reference(skinny_gemm_reference(x, weight), expected_residual, gain, 1e-5)
    assert_close(out, skinny_gemm_reference(expected, next_weight))


def test_a_row_of_a_norm_does_not_depend_on_the_rows_beside_it() -> None:
    (x, weight, gain), residual = operands(16, 192, 576, torch.bfloat16), randn(16, 192, dtype=torch.bfloat16)
    few = skinny_gemm_add_norm(x[3:6], weight, residual[3:6].clone(), gain, 1e-5)
    many = skinny_gemm_add_norm(x, weight, residual, gain, 1e-5)
    assert torch.equal(few.rows, many.rows[3:6])
    assert torch.equal(square_sums(few), square_sums(many)[3:6])


@pytest.mark.parametrize(
    ("x", "weight", "residual", "gain", "text"),
    [
        (randn(65, 8), randn(4, 8), randn(65, 4), randn(4), r"x of shape \(65, 8\) must have at most 64 rows"),
        (randn(2, 8), randn(4, 7), randn(2, 4), randn(4), r"weight of shape \(4, 7\) must be of shape \(4, 8\)"),
        (randn(2, 8), randn(4, 8), randn(1, 4), randn(4), r"residual of shape \(1, 4\) must be of shape \(2, 4\)"),
        (randn(2, 8), randn(4, 8), randn(2, 4), randn(3), r"gain of shape \(3,\) must be of shape \(4,\)"),
        (randn(2, 8), randn(4, 8), randn(2, 4).half(), randn(4), "residual in torch.float16 must be in torch.float32"),
    ],
)
def test_what_does_not_fit_the_norm_is_named(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        skinny_gemm_add_norm(x, weight, residual, gain, 1e-5)


def test_square_sums_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"square_sums of shape \(3, 5\) must be of shape \(3, 2\)"):
        skinny_gemm(randn(2, 8), randn(4, 8), scaling=Scaling(randn(3, 5), 1e-5))


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


def test_a_gated_weight_of_other_than_two_rows_or_with_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight of shape \(7, 1, 64\) must be of shape \(7, 2, 64\)"):
        skinny_gemm(randn(2, 64), randn(7, 1, 64))
    with pytest.raises(ValueError, match=r"bias of shape \(4,\) must not be given"):
        skinny_gemm(randn(2, 64), randn(4, 2, 64), randn(4))
