"""Cases of products: of few rows, where reading the weight is all the cost, and of gate and up of many."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch

from kernel_bench.case import BF16, VOCAB_SIZE, Case, copies, error_against, relative_error, worst
from lightserve.kernels.gated_gemm import gated_gemm, gated_gemm_reference
from lightserve.kernels.gemv import gemv, gemv_reference, is_gated
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
    """A weight of n features; a gated one has two rows for each, gate and up."""

    name: str
    n: int
    k: int
    gated: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return (self.n, 2, self.k) if self.gated else (self.n, self.k)

    def weights(self) -> list[torch.Tensor]:
        """Draw as many as do not fit into a cache."""
        return [torch.randn(self.shape, dtype=BF16) for _ in copies(2 * prod(self.shape))]

    def num_bytes(self, m: int) -> int:
        """Count what a product of m rows reads and writes."""
        return 2 * (prod(self.shape) + m * self.k + m * self.n)


PRODUCTS = (
    Product("8B qkv", 6144, 4096),
    Product("8B out", 4096, 4096),
    Product("8B gate_up", 14336, 4096, gated=True),
    Product("8B down", 4096, 14336),
    Product("8B head", VOCAB_SIZE, 4096),
    Product("1B qkv", 3072, 2048),
    Product("1B out", 2048, 2048),
    Product("1B gate_up", 8192, 2048, gated=True),
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
    weights = product.weights()
    for m in row_counts:
        x = torch.randn(m, product.k, dtype=BF16)
        yield Case(
            f"{product.name}, m = {m}",
            [partial(kernel, x, weight) for weight in weights],
            partial(error_against, kernel, reference, x, weights[0]),
            bytes=product.num_bytes(m),
            rival=[partial(_library_product, x, weight) for weight in weights],
        )


def _library_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product = torch.nn.functional.linear(x, weight.flatten(0, -2))
    return silu_mul(product.view(len(x), *weight.shape[:2])) if is_gated(weight) else product


def gated_gemm_cases(
    products: Sequence[Product] = PRODUCTS, row_counts: Sequence[int] = (1024, 1100, 2048, 8192)
) -> Iterator[Case]:
    for product in (product for product in products if product.gated):
        cases = _cases(product, gated_gemm, gated_gemm_reference, row_counts)
        for m, case in zip(row_counts, cases, strict=True):
            yield replace(case, flops=2 * m * prod(product.shape))


def _scaled_cases(product: Product, row_counts: Sequence[int]) -> Iterator[Case]:
    weights, k = product.weights(), product.k
    for m in row_counts:
        x, scaling = torch.randn(m, k, dtype=BF16), Scaling(torch.rand(_NUM_PARTS, m) * k, _EPS)
        run, reference = (partial(function, scaling=scaling) for function in (skinny_gemm, skinny_gemm_reference))
        yield Case(
            f"{product.name}, m = {m}, of a norm",
            [partial(run, x, weight) for weight in weights],
            partial(error_against, run, reference, x, weights[0]),
            bytes=product.num_bytes(m),
        )


def _add_norm_cases(product: Product, row_counts: Sequence[int]) -> Iterator[Case]:
    n, weights, gain = product.n, product.weights(), torch.randn(product.n, dtype=BF16)
    for m in row_counts:
        x, residual = torch.randn(m, product.k, dtype=BF16), torch.randn(m, n, dtype=BF16)
        yield Case(
            f"{product.name}, m = {m}, added and normed",
            [partial(skinny_gemm_add_norm, x, weight, residual, gain, _EPS) for weight in weights],
            partial(_add_norm_error, x, weights[0], residual, gain),
            bytes=product.num_bytes(m) + 4 * m * n,
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
