"""Cases of kernels that do little with much: what they read and write is all their cost."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from kernel_bench.case import BF16, VOCAB_SIZE, Case, copies, error_against, relative_error, worst
from lightserve.kernels.embedding import embedding, embedding_reference
from lightserve.kernels.rms_norm import add_rms_norm, add_rms_norm_reference
from lightserve.kernels.rope_kv_write import Rotation, rope_kv_write, rope_kv_write_reference
from lightserve.kernels.silu_mul import silu_mul, silu_mul_reference


def rms_norm_cases(row_counts: Sequence[int] = (1, 64, 8192), hidden_size: int = 4096) -> Iterator[Case]:
    weight = torch.randn(hidden_size, dtype=BF16)
    for n in row_counts:
        size = 4 * n * hidden_size * 2
        sets = [[torch.randn(n, hidden_size, dtype=BF16) for _ in range(2)] for _ in copies(size)]
        runs = [partial(add_rms_norm, x, residual, weight, 1e-5) for x, residual in sets]
        yield Case(f"add, {n} x {hidden_size}", runs, partial(_add_rms_norm_error, weight, *sets[0]), bytes=size)


def _add_rms_norm_error(weight: torch.Tensor, x: torch.Tensor, residual: torch.Tensor) -> float:
    sums, expected_sums = residual.clone(), residual.clone()
    expected = add_rms_norm_reference(x, expected_sums, weight, 1e-5)
    out = add_rms_norm(x, sums, weight, 1e-5)
    return worst(relative_error(out, expected), relative_error(sums, expected_sums))


def rope_kv_write_cases(
    row_counts: Sequence[int] = (1, 64, 8192),
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    num_slots: int = 65536,
) -> Iterator[Case]:
    num_heads, num_kv_heads = heads
    width = (num_heads + 2 * num_kv_heads) * head_dim
    rotation = Rotation(torch.randn(max(row_counts), head_dim))
    cache = torch.zeros(num_slots, 2, num_kv_heads, head_dim, dtype=BF16)
    for n in row_counts:
        positions, slots = torch.arange(n).int(), torch.randperm(num_slots)[:n].int()
        size = 2 * n * width * 2
        sets = [torch.randn(n, width, dtype=BF16) for _ in copies(size)]
        runs = [partial(rope_kv_write, qkv, rotation, positions, slots, cache, num_heads=num_heads) for qkv in sets]
        error = partial(_rope_kv_write_error, sets[0], rotation, positions, slots, cache, num_heads)
        yield Case(f"{n} x {num_heads}/{num_kv_heads} x {head_dim}", runs, error, bytes=size)


def _rope_kv_write_error(
    qkv: torch.Tensor,
    rotation: Rotation,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    num_heads: int,
) -> float:
    cache.zero_()
    expected_cache = cache.clone()
    expected = rope_kv_write_reference(qkv, rotation, positions, slots, expected_cache, num_heads=num_heads)
    out = rope_kv_write(qkv, rotation, positions, slots, cache, num_heads=num_heads)
    return worst(relative_error(out, expected), relative_error(cache, expected_cache))


def silu_mul_cases(row_counts: Sequence[int] = (1, 64, 8192), width: int = 14336) -> Iterator[Case]:
    for n in row_counts:
        size = 3 * n * width * 2
        sets = [torch.randn(n, width, 2, dtype=BF16) for _ in copies(size)]
        error = partial(error_against, silu_mul, silu_mul_reference, sets[0])
        yield Case(f"{n} x {width}", [partial(silu_mul, x) for x in sets], error, bytes=size)


def embedding_cases(
    row_counts: Sequence[int] = (64, 8192), vocab_size: int = VOCAB_SIZE, hidden_size: int = 4096
) -> Iterator[Case]:
    table = torch.randn(vocab_size, hidden_size, dtype=BF16)
    for n in row_counts:
        size = 2 * n * hidden_size * 2
        sets = [torch.randint(0, vocab_size, (n,), dtype=torch.int32) for _ in copies(size)]
        error = partial(error_against, embedding, embedding_reference, sets[0], table)
        yield Case(f"{n} x {hidden_size}", [partial(embedding, ids, table) for ids in sets], error, bytes=size)
