"""norm_gemv and silu_gemv against their references."""

import pytest
import torch

from lightserve.kernels.fused_gemv import norm_gemv, norm_gemv_reference, silu_gemv, silu_gemv_reference
from tests.kernels.kit import DTYPES, assert_close, randn

SHAPES = [(5, 64), (16, 256), (37, 576), (50, 1000)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("adds", [False, True])
def test_norm_gemv_equals_its_reference(n: int, k: int, adds: bool, dtype: torch.dtype) -> None:
    x, residual, gain = (randn(*shape, dtype=dtype) for shape in ((1, k), (1, k), (k,)))
    arguments = (x if adds else None, residual, gain, 1e-5, randn(n, k, dtype=dtype), randn(n, dtype=dtype))
    before = residual.clone()
    out, total = norm_gemv(*arguments)
    expected, expected_total = norm_gemv_reference(*arguments)
    assert_close(out, expected)
    assert_close(total, expected_total)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_silu_gemv_equals_its_reference(n: int, k: int, dtype: torch.dtype) -> None:
    gate_up, weight = randn(1, 2 * k, dtype=dtype), randn(n, k, dtype=dtype)
    assert_close(silu_gemv(gate_up, weight), silu_gemv_reference(gate_up, weight))


def test_more_than_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="one row"):
        silu_gemv(randn(2, 128), randn(8, 64))
