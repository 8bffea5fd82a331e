"""gated_gemm against its reference."""

from collections.abc import Callable

import pytest
import torch

from lightserve.kernels import gated_gemm as module
from lightserve.kernels.gated_gemm import gated_gemm, gated_gemm_reference, is_weight_for_gated_gemm
from lightserve.kernels.launch import has_tma
from lightserve.kernels.skinny_gemm import skinny_gemm
from tests.kernels.kit import DEVICE, assert_close, poisoned, randn, sparse

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [0, 1, 65, 300])
@pytest.mark.parametrize(("n", "k"), [(8, 8), (136, 104), (264, 192)])
def test_gated_gemm_equals_its_reference(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = randn(m, k, dtype=dtype), randn(n, 2, k, dtype=dtype) * k**-0.5
    assert_close(gated_gemm(x, weight, out=poisoned(m, n, dtype=dtype)), gated_gemm_reference(x, weight))


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (11, 1), (8, 2), (9, 3)])
def test_every_tile_is_computed_by_however_many_programs(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = randn(128 * rows - 3, 64, dtype=torch.bfloat16), randn(128 * columns - 8, 2, 64, dtype=torch.bfloat16)
    weight *= 0.125
    expected = gated_gemm_reference(x, weight)
    for num_programs in (1, 4, 1000):
        monkeypatch.setattr(module, "num_multiprocessors", lambda _, number=num_programs: number)
        assert_close(gated_gemm(x, weight, out=poisoned(*expected.shape, dtype=torch.bfloat16)), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
@pytest.mark.parametrize("product", [gated_gemm, skinny_gemm])
def test_gate_and_up_are_told_apart_and_large_gates_do_not_overflow(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    weight, x = torch.zeros(8, 2, 8, dtype=torch.float16), torch.zeros(2, 8, dtype=torch.float16)
    weight[:4, 0, 0], weight[:4, 1, 0] = (
        torch.tensor([20000.0, -20000.0, 0.0, 100.0]),
        torch.tensor([1.0, 1.0, 1.0, 3.0]),
    )
    x[:, 0] = 1.0
    out = product(x.to(DEVICE), weight.to(DEVICE))
    assert out[1].tolist() == [20000.0, 0.0, 0.0, 300.0, 0.0, 0.0, 0.0, 0.0]


def test_weights_that_it_takes_are_told_from_others() -> None:
    weight = randn(16, 2, 64, dtype=torch.bfloat16)
    assert is_weight_for_gated_gemm(weight) == has_tma(DEVICE)
    assert not is_weight_for_gated_gemm(weight.float())
    assert not is_weight_for_gated_gemm(weight[:, :, :63].contiguous())
    assert not is_weight_for_gated_gemm(weight[:15])
    assert not is_weight_for_gated_gemm(randn(16 * 2 * 64 + 1).bfloat16()[1:].view(16, 2, 64))


@pytest.mark.parametrize(
    ("x", "weight", "out", "text"),
    [
        (
            randn(3, 8),
            randn(8 * 2 * 8 + 1).bfloat16()[1:].view(8, 2, 8),
            None,
            r"rows of weight of shape \(16, 8\) must",
        ),
        (randn(3, 8), randn(8, 2, 16), None, r"weight of shape \(8, 2, 16\) must be of shape \(8, 2, 8\)"),
        (randn(3, 8), randn(8, 8), None, r"weight of shape \(8, 8\) must have a row of gate and one of up"),
        (sparse(randn(3, 8)), randn(8, 2, 8), None, r"x with strides \(16, 2\) must be contiguous"),
        (randn(3, 8), randn(8, 2, 8), randn(3, 9), r"out of shape \(3, 9\) must be of shape \(3, 8\)"),
        (randn(3, 4), randn(8, 2, 4), None, r"rows of x of shape \(3, 4\) must begin at multiples of 16 bytes"),
        (randn(3, 8), randn(9, 2, 8), None, r"rows of out of shape \(3, 9\) must begin at multiples of 16 bytes"),
    ],
)
def test_what_does_not_fit_is_named(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        gated_gemm(
            x.bfloat16() if x.is_contiguous() else x,
            weight.bfloat16() if weight.dtype is torch.float32 else weight,
            out=out,
        )
