"""Cases of products of few rows, where reading the weight is all the cost."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kernel_bench.case import BF16, VOCAB_SIZE, Case, copies, error_against, relative_error, worst
from lightserve.kernels.gemv import gemv, gemv_reference
from lightserve.kernels.normed import Normed, Scaling
from lightserve.kernels.silu_mul import silu_mul
from lightserve.kernels.skinny_gemm import (
    skinny_gemm,
    skinny_gemm_add_norm,
    skinny_gemm_add_norm_reference,
    skinny_gemm_reference,
)

_EPS, _NUM_PARTS = 1e-5, 64


class Product(NamedTuple):
    """A weight, [n, k]; a gated one holds two halves, gate and up."""

    name: str
    n: int
    k: int
    gated: bool = False


PRODUCTS = (
    Product("8B qkv", 6144, 4096),
    Product("8B out", 4096, 4096),
    Product("8B gate_up", 28672, 4096, gated=True),
    Product("8B down", 4096, 14336),
    Product("8B head", VOCAB_SIZE, 4096),
    Product("1B qkv", 3072, 2048),
    Product("1B out", 2048, 2048),
    Product("1B gate_up", 16384, 2048, gated=True),
    Product("1B down", 2048, 8192),
    Product("1B head", VOCAB_SIZE, 2048),
)


def gemv_cases(products: Sequence[Product] = PRODUCTS) -> Iterator[Case]:
    for product in products:
        yield from _cases(product, gemv, gemv_reference, [1])


def skinny_gemm_cases(
    products: Sequence[Product] = PRODUCTS, row_counts: Sequence[int] = (4, 16, 64)
) -> Iterator[Case]:
    """Plain products; then, of those beside a norm in a model, with the half of the norm that is theirs."""
    for product in products:
        yield from _cases(product, skinny_gemm, skinny_gemm_reference, row_counts)
        if product.n <= product.k:
            yield from _add_norm_cases(product, row_counts)
        elif product.n != VOCAB_SIZE:
            yield from _scaled_cases(product, row_counts)


def _cases(
    product: Product,
    kernel: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    row_counts: Sequence[int],
) -> Iterator[Case]:
    name, n, k, gated = product
    weights = [torch.randn(n, k, dtype=BF16) for _ in copies(2 * n * k)]
    for m in row_counts:
        x = torch.randn(m, k, dtype=BF16)
        yield Case(
            f"{name}, m = {m}",
            [partial(kernel, x, weight, gated=gated) for weight in weights],
            partial(error_against, partial(kernel, gated=gated), partial(reference, gated=gated), x, weights[0]),
            bytes=2 * (n * k + m * k + m * n // (2 if gated else 1)),
            rival=[partial(_library_product, x, weight, gated=gated) for weight in weights],
        )


def _library_product(x: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> torch.Tensor:
    product = torch.nn.functional.linear(x, weight)
    return silu_mul(product) if gated else product


def _scaled_cases(product: Product, row_counts: Sequence[int]) -> Iterator[Case]:
    name, n, k, gated = product
    weights = [torch.randn(n, k, dtype=BF16) for _ in copies(2 * n * k)]
    for m in row_counts:
        x, scaling = torch.randn(m, k, dtype=BF16), Scaling(torch.rand(_NUM_PARTS, m) * k, _EPS)
        run, reference = (
            partial(function, gated=gated, scaling=scaling) for function in (skinny_gemm, skinny_gemm_reference)
        )
        yield Case(
            f"{name}, m = {m}, of a norm",
            [partial(run, x, weight) for weight in weights],
            partial(error_against, run, reference, x, weights[0]),
            bytes=2 * (n * k + m * k + m * n // (2 if gated else 1)),
        )


def _add_norm_cases(product: Product, row_counts: Sequence[int]) -> Iterator[Case]:
    name, n, k, _ = product
    weights, gain = [torch.randn(n, k, dtype=BF16) for _ in copies(2 * n * k)], torch.randn(n, dtype=BF16)
    for m in row_counts:
        x, residual = torch.randn(m, k, dtype=BF16), torch.randn(m, n, dtype=BF16)
        yield Case(
            f"{name}, m = {m}, added and normed",
            [partial(skinny_gemm_add_norm, x, weight, residual, gain, _EPS) for weight in weights],
            partial(_add_norm_error, x, weights[0], residual, gain),
            bytes=2 * (n * k + m * k + 3 * m * n),
        )


def _add_norm_error(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor) -> float:
    summed, expected_sum = residual.clone(), residual.clone()
    normed = skinny_gemm_add_norm(x, weight, summed, gain, _EPS)
    expected = skinny_gemm_add_norm_reference(x, weight, expected_sum, gain, _EPS)
    return worst(
        relative_error(summed, expected_sum),
        relative_error(normed.rows, expected.rows),
        relative_error(_square_sums(normed), _square_sums(expected)),
    )


def _square_sums(normed: Normed) -> torch.Tensor:
    return torch.empty(0) if normed.scaling is None else normed.scaling.square_sums.sum(0)
