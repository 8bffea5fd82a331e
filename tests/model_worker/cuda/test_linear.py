"""Products on a GPU and the norms around them: in one kernel and apart."""

from unittest.mock import Mock

import pytest
import torch

from lightserve.kernels.gated_gemm import gated_gemm
from lightserve.kernels.gemv import gemv_reference
from lightserve.kernels.normed import Normed
from lightserve.kernels.skinny_gemm import MAX_ROWS
from lightserve.model_worker.cuda import linear
from lightserve.model_worker.cuda.backend import CudaBackend
from lightserve.model_worker.cuda.linear import CudaLinear, CudaNormedGatedLinear
from lightserve.model_worker.layers.linear import LinearAddNorm, LinearThenAddNorm
from lightserve.model_worker.tensor_parallel import SingleRank
from lightserve.rope_config import RopeConfig
from tests.kernels.kit import DEVICE, assert_close, randn

SIZE, WIDTH, EPS = 96, 64, 1e-5


class TwoRanks(SingleRank):
    """Another rank whose part is the same."""

    world_size = 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


def make_backend(dtype: torch.dtype) -> CudaBackend:
    shape = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16, "max_position": 1, "max_rows": 1}
    return CudaBackend(RopeConfig(theta=1e4), eps=EPS, dtype=dtype, device=DEVICE, **shape)


def make_both(dtype: torch.dtype) -> tuple[LinearAddNorm, LinearAddNorm, CudaBackend]:
    backend = make_backend(dtype)
    weight, gain = randn(SIZE, WIDTH, dtype=dtype) * WIDTH**-0.5, randn(SIZE, dtype=dtype)
    apart = LinearThenAddNorm(CudaLinear(weight), backend, gain, SingleRank())
    return backend.linear_add_norm(weight, gain, SingleRank()), apart, backend


@pytest.mark.parametrize("magnitude", [30, 1, EPS**0.5])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, MAX_ROWS, MAX_ROWS + 1])
def test_the_next_product_is_the_same_in_one_kernel_and_apart(num_rows: int, gated: bool, magnitude: float) -> None:
    dtype = torch.bfloat16
    together, apart, backend = make_both(dtype)
    weight = randn(2 * WIDTH, SIZE, dtype=dtype) * SIZE**-0.5
    bias = randn(2 * WIDTH, dtype=dtype)
    gate_up = weight.view(WIDTH, 2, SIZE)
    following = backend.normed_gated_linear(gate_up) if gated else backend.normed_linear(weight, bias)
    x, residual = (magnitude * randn(num_rows, size, dtype=dtype) for size in (WIDTH, SIZE))
    expected_residual = residual.clone()
    expected = following(apart(x, expected_residual))
    assert_close(following(together(x, residual)), expected)
    assert_close(residual, expected_residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 60])
@pytest.mark.parametrize("num_rows", [0, 1, MAX_ROWS, MAX_ROWS + 1, 80])
def test_gate_and_up_of_any_number_of_rows_are_the_same(
    num_rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "FUSED_ROWS", 80)
    weight, x = randn(width, 2, SIZE, dtype=dtype) * SIZE**-0.5, randn(num_rows, SIZE, dtype=dtype)
    assert_close(CudaNormedGatedLinear(weight)(Normed(x)), gemv_reference(x, weight))


def test_many_rows_of_gate_and_up_are_done_in_one_kernel_if_the_weight_is_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_kernel = Mock(wraps=gated_gemm)
    monkeypatch.setattr(linear, "gated_gemm", one_kernel)
    monkeypatch.setattr(linear, "FUSED_ROWS", 80)
    for width, dtype in [(8, torch.bfloat16), (7, torch.bfloat16), (8, torch.float32)]:
        gate_and_up = CudaNormedGatedLinear(randn(width, 2, 8, dtype=dtype))
        for num_rows in (79, 80):
            gate_and_up(Normed(randn(num_rows, 8, dtype=dtype)))
    assert [(len(x), len(weight), x.dtype) for (x, weight), _ in one_kernel.call_args_list] == [(80, 8, torch.bfloat16)]


@pytest.mark.parametrize(
    ("num_rows", "dtype", "is_left"),
    [(1, torch.bfloat16, False), (2, torch.bfloat16, True), (65, torch.bfloat16, False), (2, torch.float16, False)],
)
def test_scaling_is_left_to_the_next_product_for_few_rows_of_bfloat16(
    num_rows: int, dtype: torch.dtype, is_left: bool
) -> None:
    together, _, _ = make_both(dtype)
    normed = together(randn(num_rows, WIDTH, dtype=dtype), randn(num_rows, SIZE, dtype=dtype))
    assert (normed.scaling is not None) == is_left


def test_a_norm_that_is_given_its_place_is_complete() -> None:
    together, apart, _ = make_both(torch.bfloat16)
    x, residual = randn(3, WIDTH, dtype=torch.bfloat16), randn(3, SIZE, dtype=torch.bfloat16)
    out = torch.empty_like(residual)
    expected = apart(x, residual.clone()).rows
    normed = together(x, residual, out=out)
    assert normed.rows is out
    assert normed.scaling is None
    assert torch.equal(out, expected)


def test_the_parts_of_all_ranks_are_summed_before_the_norm() -> None:
    backend, dtype = make_backend(torch.bfloat16), torch.bfloat16
    weight, gain = randn(SIZE, WIDTH, dtype=dtype) * WIDTH**-0.5, randn(SIZE, dtype=dtype)
    x, residual = randn(3, WIDTH, dtype=dtype), randn(3, SIZE, dtype=dtype)
    whole = LinearThenAddNorm(lambda x: 2 * (x @ weight.T), backend, gain, SingleRank())
    expected = whole(x, residual.clone())
    assert_close(backend.linear_add_norm(weight, gain, TwoRanks())(x, residual).rows, expected.rows)
