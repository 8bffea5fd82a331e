"""Cases of attention over random slots."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from random import Random
from typing import NamedTuple, TypeAlias

import torch

from kernel_bench.case import BF16, Case, copies, relative_error, worst
from lightserve.kernels.decode_attention import decode_attention, decode_attention_reference
from lightserve.kernels.decode_plan import plan_decode
from lightserve.kernels.prefill_attention import (
    PrefillPlan,
    gather_len_for,
    plan_prefill,
    prefill_attention,
    prefill_attention_reference,
)
from lightserve.kernels.rope_kv_write import Rotation, rope_kv_write

HEADS, HEAD_DIMS = (32, 8), (128, 64)
Length: TypeAlias = int | range  # of every request, or drawn for each


class DecodeBatch(NamedTuple):
    """Requests that decode."""

    num_reqs: int
    seq_len: Length

    def __str__(self) -> str:
        return f"{self.num_reqs} x {_length_text(self.seq_len)}"


class PrefillBatch(NamedTuple):
    """Requests that prefill."""

    num_reqs: int
    extend_len: Length
    cached_len: Length = 0

    def __str__(self) -> str:
        after = f" after {_length_text(self.cached_len)}" if self.cached_len else ""
        return f"{self.num_reqs} x {_length_text(self.extend_len)}{after}"


DECODE_BATCHES = (
    DecodeBatch(16, 4096),
    DecodeBatch(64, 2048),
    DecodeBatch(256, 512),
    DecodeBatch(1024, 512),
    DecodeBatch(1, 32768),
    DecodeBatch(1, 8192),
    DecodeBatch(256, range(50, 2000)),
)
# Few requests, which gain from one launch less; and many, to see what that costs them.
ROTATED_BATCHES = (DecodeBatch(16, 4096), DecodeBatch(1, 32768), DecodeBatch(1, 8192), DecodeBatch(256, 512))
PREFILL_BATCHES = (
    PrefillBatch(1, 2048),
    PrefillBatch(1, 8192),
    PrefillBatch(4, 2048),
    PrefillBatch(16, 512),
    PrefillBatch(1, 2048, 6144),
    PrefillBatch(12, range(20, 1500), range(3000)),
    PrefillBatch(64, 32, 1024),
)


def _length_text(length: Length) -> str:
    return str(length) if isinstance(length, int) else f"{length.start}-{length.stop}"


def _draw(length: Length, num_reqs: int, random: Random) -> list[int]:
    return [length] * num_reqs if isinstance(length, int) else random.choices(length, k=num_reqs)


def _scatter(lengths: Sequence[int], num_slots: int) -> torch.Tensor:
    """Give every request random slots of its own; [len(lengths), longest] int32."""
    table = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    slots, start = torch.randperm(num_slots).int(), 0
    for row, length in enumerate(lengths):
        table[row, :length] = slots[start : start + length]
        start += length
    return table


def decode_attention_cases(
    batches: Sequence[DecodeBatch] = DECODE_BATCHES,
    rotated: Sequence[DecodeBatch] = ROTATED_BATCHES,
    heads: tuple[int, int] = HEADS,
    head_dims: Sequence[int] = HEAD_DIMS,
    num_slots: int = 1024 * 512 + 1,
) -> Iterator[Case]:
    """Attention alone; then, of some batches, with the rotation in it and with the rotation's own kernel before it.

    The bytes of all three are those of K and V, so that their rates compare as their times do.
    """
    for head_dim in head_dims:
        cache = torch.randn(num_slots, 2, heads[1], head_dim, dtype=BF16)
        sizes = f"{heads[0]}/{heads[1]} x {head_dim}"
        for batch in batches:
            yield _Decode(batch, heads[0], cache).attention_alone(f"{batch}, {sizes}")
        for batch in rotated:
            decode = _Decode(batch, heads[0], cache)
            yield decode.rotation_inside(f"rotation inside, {batch}, {sizes}")
            yield decode.rotation_before(f"rotation before, {batch}, {sizes}")


class _Decode:
    """A batch that decodes, with several Token Tables."""

    def __init__(self, batch: DecodeBatch, num_heads: int, cache: torch.Tensor) -> None:
        _, _, num_kv_heads, head_dim = cache.shape
        lengths = _draw(batch.seq_len, batch.num_reqs, Random(0))  # the same whatever was drawn before
        self._bytes = sum(lengths) * cache[0].nbytes
        self._num_heads = num_heads
        self._scale = head_dim**-0.5
        self._cache = cache
        self._rows = torch.arange(batch.num_reqs).int()
        self._seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self._tables = [_scatter(lengths, len(cache)) for _ in copies(self._bytes)]
        self._plan = plan_decode(
            self._rows, self._seq_lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        self._qkv = torch.randn(batch.num_reqs, (num_heads + 2 * num_kv_heads) * head_dim, dtype=BF16)
        self._q = torch.randn(batch.num_reqs, num_heads, head_dim, dtype=BF16)
        self._out = torch.full_like(self._q, float("nan"))
        self._rotation = Rotation(torch.randn(max(lengths), head_dim))

    def attention_alone(self, name: str) -> Case:
        """Take queries that are rotated, and K and V that are written."""

        def run(table: torch.Tensor) -> torch.Tensor:
            return self._attend(self._q, table, None)

        def error() -> float:
            return relative_error(run(self._tables[0]), self._expected(self._q, None))

        return Case(name, [partial(run, table) for table in self._tables], error, bytes=self._bytes)

    def rotation_inside(self, name: str) -> Case:
        """Leave the rotation and the writing to attention."""

        def run(table: torch.Tensor) -> torch.Tensor:
            return self._attend(self._qkv, table, self._rotation)

        runs = [partial(run, table) for table in self._tables]
        return Case(name, runs, partial(self._rotated_error, runs[0]), bytes=self._bytes)

    def rotation_before(self, name: str) -> Case:
        """Rotate and write by a kernel of its own, then attend."""

        def run(table: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            q = rope_kv_write(self._qkv, self._rotation, positions, slots, self._cache, num_heads=self._num_heads)
            return self._attend(q, table, None)

        positions = self._seq_lens - 1
        runs = [partial(run, table, self._last_slots(table)) for table in self._tables]
        return Case(name, runs, partial(self._rotated_error, runs[0]), bytes=self._bytes)

    def _attend(self, q: torch.Tensor, table: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        return decode_attention(
            q,
            self._cache,
            table,
            self._rows,
            self._seq_lens,
            scale=self._scale,
            rotation=rotation,
            plan=self._plan,
            out=self._out,
        )

    def _expected(self, q: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        batch = (self._tables[0], self._rows, self._seq_lens)
        return decode_attention_reference(q, self._cache, *batch, scale=self._scale, rotation=rotation)

    def _rotated_error(self, run: Callable[[], torch.Tensor]) -> float:
        """Compare what comes out, and what was written to the newest slots, both poisoned before."""
        slots = self._last_slots(self._tables[0]).long()
        expected = self._expected(self._qkv, self._rotation)
        expected_kv = self._cache[slots]
        self._cache[slots] = float("nan")
        self._out.fill_(float("nan"))
        out = run()
        return worst(relative_error(out, expected), relative_error(self._cache[slots], expected_kv))

    def _last_slots(self, table: torch.Tensor) -> torch.Tensor:
        return table[self._rows.long(), self._seq_lens.long() - 1]


def prefill_attention_cases(
    batches: Sequence[PrefillBatch] = PREFILL_BATCHES,
    heads: tuple[int, int] = HEADS,
    head_dims: Sequence[int] = HEAD_DIMS,
    num_slots: int = 131072,
) -> Iterator[Case]:
    for head_dim in head_dims:
        cache = torch.randn(num_slots, 2, heads[1], head_dim, dtype=BF16)
        for batch in batches:
            yield _prefill_case(batch, heads[0], cache)


def _prefill_case(batch: PrefillBatch, num_heads: int, cache: torch.Tensor) -> Case:
    _, _, num_kv_heads, head_dim = cache.shape
    random = Random(0)  # the same lengths whatever was drawn before
    extend_lens, cached_lens = (
        _draw(length, batch.num_reqs, random) for length in (batch.extend_len, batch.cached_len)
    )
    lengths = [extend + cached for extend, cached in zip(extend_lens, cached_lens, strict=True)]
    rows, seq_lens = torch.arange(batch.num_reqs).int(), torch.tensor(lengths, dtype=torch.int32)
    cu_seqlens = torch.tensor([0, *accumulate(extend_lens)], dtype=torch.int32)
    q = torch.randn(sum(extend_lens), num_heads, head_dim, dtype=BF16)
    out = torch.full_like(q, float("nan"))
    scale = head_dim**-0.5

    def run(table: torch.Tensor, plan: PrefillPlan) -> torch.Tensor:
        return prefill_attention(q, cache, table, rows, cu_seqlens, seq_lens, scale=scale, plan=plan, out=out)

    def plan(table: torch.Tensor) -> PrefillPlan:
        return plan_prefill(
            table,
            rows,
            cu_seqlens,
            seq_lens,
            num_tokens=len(q),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            gather_len=gather_len_for(extend_lens, lengths),
        )

    def error() -> float:
        expected = prefill_attention_reference(q, cache, tables[0], rows, cu_seqlens, seq_lens, scale=scale)
        return relative_error(runs[0](), expected)

    tables = [_scatter(lengths, len(cache)) for _ in range(2)]
    runs = [partial(run, table, plan(table)) for table in tables]
    scores = sum(extend * (cached + (extend + 1) / 2) for extend, cached in zip(extend_lens, cached_lens, strict=True))
    return Case(f"{batch}, x {head_dim}", runs, error, flops=4 * head_dim * num_heads * scores)
