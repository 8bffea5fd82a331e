"""rms_norm and add_rms_norm against their references."""

import pytest
import torch

from lightserve.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.kernels.kit import DTYPES, assert_close, poisoned, randn, sparse

SHAPES = [(0, 64), (1, 1), (3, 97), (5, 576), (2, 4096)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_equals_its_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, gain = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    out = rms_norm(x, gain, 1e-5, out=poisoned(*shape, dtype=dtype))
    assert_close(out, rms_norm_reference(x, gain, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_equals_its_reference_and_updates_the_residual(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, gain = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    expected_residual = residual.clone()
    expected = add_rms_norm_reference(x, expected_residual, gain, 1e-5)
    out = add_rms_norm(x, residual, gain, 1e-5, out=poisoned(*shape, dtype=dtype))
    assert_close(out, expected)
    assert_close(residual, expected_residual)


def test_rows_may_be_strided() -> None:
    wide, gain = randn(4, 200), randn(100)
    assert_close(rms_norm(wide[:, 50:150], gain, 1e-5), rms_norm_reference(wide[:, 50:150], gain, 1e-5))


def test_a_gain_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gain of shape \(7,\) must be of shape \(8,\)"):
        rms_norm(randn(2, 8), randn(7), 1e-5)


def test_an_output_or_residual_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"out of shape \(1, 8\) must be of shape \(2, 8\)"):
        rms_norm(randn(2, 8), randn(8), 1e-5, out=randn(1, 8))
    with pytest.raises(ValueError, match=r"residual of shape \(1, 8\) must be of shape \(2, 8\)"):
        add_rms_norm(randn(2, 8), randn(1, 8), randn(8), 1e-5)


def test_rows_with_gaps_between_their_elements_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x with strides \(16, 2\) must have contiguous rows"):
        rms_norm(sparse(randn(2, 8)), randn(8), 1e-5)
