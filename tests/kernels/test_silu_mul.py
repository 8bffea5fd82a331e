"""silu_mul against its reference."""

import pytest
import torch

from lightserve.kernels.silu_mul import silu_mul, silu_mul_reference
from tests.kernels.kit import DTYPES, assert_close, poisoned, randn, sparse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 97), (5, 1536), (2, 14336)])
def test_silu_mul_equals_its_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = randn(*shape, 2, dtype=dtype)
    assert_close(silu_mul(gate_up, out=poisoned(*shape, dtype=dtype)), silu_mul_reference(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
def test_large_gates_neither_overflow_nor_turn_to_nan() -> None:
    gate_up = torch.tensor([[[60000.0, 1.0], [-60000.0, 1.0]]], dtype=torch.float16)
    out = silu_mul(gate_up.to(randn(1).device))
    assert out.tolist() == [[60000.0, 0.0]]


def test_gaps_and_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gate_up of shape \(2, 7, 3\) must be of shape \(2, 7, 2\)"):
        silu_mul(randn(2, 7, 3))
    with pytest.raises(ValueError, match=r"gate_up with strides \(16, 4, 2\) must be contiguous"):
        silu_mul(sparse(randn(2, 4, 2)))
    with pytest.raises(ValueError, match=r"out of shape \(1, 4\) must be of shape \(2, 4\)"):
        silu_mul(randn(2, 4, 2), out=randn(1, 4))
