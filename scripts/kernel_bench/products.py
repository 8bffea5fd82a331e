"""Cases of products of few rows, where reading the weight is all the cost."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kernel_bench.case import BF16, VOCAB_SIZE, Case, copies, error_against
from lightserve.kernels.gemv import gemv, gemv_reference
from lightserve.kernels.silu_mul import silu_mul
from lightserve.kernels.skinny_gemm import skinny_gemm, skinny_gemm_reference


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
    for product in products:
        yield from _cases(product, skinny_gemm, skinny_gemm_reference, row_counts)


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
