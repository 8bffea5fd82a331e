"""norm_gemv against its reference."""

import pytest
import torch

from lightserve.kernels.norm_gemv import norm_gemv, norm_gemv_reference
from tests.kernels.kit import DTYPES, assert_close, randn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(5, 64), (16, 256), (37, 576), (50, 1000)])
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


def test_more_than_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="one row"):
        norm_gemv(None, randn(2, 64), randn(64), 1e-5, randn(8, 64))
