"""rms_norm and add_rms_norm against their references."""

import pytest
import torch

from lightserve.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.kernels.kit import DTYPES, assert_close, poisoned, randn

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


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="gain"):
        rms_norm(randn(2, 8), randn(7), 1e-5)
