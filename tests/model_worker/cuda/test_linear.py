"""Products on a GPU and the norms around them: in one kernel and apart."""

import pytest
import torch

from lightserve.kernels.normed import Normed
from lightserve.kernels.rms_norm import add_rms_norm
from lightserve.kernels.skinny_gemm import MAX_ROWS
from lightserve.model_worker.cuda.linear import CudaLinear, CudaLinearAddNorm, CudaNormedLinear
from lightserve.model_worker.layers.linear import LinearThenAddNorm
from lightserve.model_worker.tensor_parallel import SingleRank
from tests.kernels.kit import assert_close, randn

SIZE, WIDTH, EPS = 96, 64, 1e-5


class Norm:
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return add_rms_norm(x, residual, gain, EPS, out=out)


def make_both(dtype: torch.dtype) -> tuple[CudaLinearAddNorm, LinearThenAddNorm]:
    weight, gain = randn(SIZE, WIDTH, dtype=dtype) * WIDTH**-0.5, randn(SIZE, dtype=dtype)
    apart = LinearThenAddNorm(CudaLinear(weight), Norm(), gain, SingleRank())
    return CudaLinearAddNorm(weight, gain, apart), apart


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_next_product_is_the_same_in_one_kernel_and_apart(num_rows: int, dtype: torch.dtype, gated: bool) -> None:
    together, apart = make_both(dtype)
    bias = None if gated else randn(WIDTH, dtype=dtype)
    following = CudaNormedLinear(randn(WIDTH, SIZE, dtype=dtype) * SIZE**-0.5, bias, gated=gated, eps=EPS)
    x, residual = randn(num_rows, WIDTH, dtype=dtype), 30 * randn(num_rows, SIZE, dtype=dtype)
    expected_residual = residual.clone()
    expected = following(apart(x, expected_residual))
    assert_close(following(together(x, residual)), expected)
    assert_close(residual, expected_residual)


@pytest.mark.parametrize(
    ("num_rows", "dtype", "is_left"),
    [(1, torch.bfloat16, False), (2, torch.bfloat16, True), (65, torch.bfloat16, False), (2, torch.float16, False)],
)
def test_scaling_is_left_to_the_next_product_for_few_rows_of_bfloat16(
    num_rows: int, dtype: torch.dtype, is_left: bool
) -> None:
    together, _ = make_both(dtype)
    normed = together(randn(num_rows, WIDTH, dtype=dtype), randn(num_rows, SIZE, dtype=dtype))
    assert (normed.square_sums is not None) == is_left


def test_a_norm_that_is_given_its_place_is_complete() -> None:
    together, apart = make_both(torch.bfloat16)
    x, residual = randn(3, WIDTH, dtype=torch.bfloat16), randn(3, SIZE, dtype=torch.bfloat16)
    out = torch.empty_like(residual)
    expected = apart(x, residual.clone()).rows
    normed = together(x, residual, out=out)
    assert normed == Normed(out)
    assert torch.equal(out, expected)
