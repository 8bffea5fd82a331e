"""The padded shapes for which graphs are captured, and which of them a batch takes.

They are spaced so that padding costs little: below 256 rows a product is bound by reading its weight, above it grows
with the rows, in steps of the library's tiles. A batch that no shape has room for is launched kernel by kernel.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from lightserve.kernels.prefill_attention import gather_len_for
from lightserve.kernels.skinny_gemm import MAX_ROWS
from lightserve.model_worker.cuda.linear import FUSED_ROWS
from lightserve.model_worker.cuda.step_inputs import CHUNKS_PER_LAUNCH, ForwardShape, SampleShape, Sampling
from lightserve.model_worker.host_batch import HostBatch

_MIXED_TOKENS = (16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
# Decode rows are planned by a kernel that is compiled for a power of two: few sizes, so that little has to be compiled.
_DECODE_CAPACITIES = (1, 8, 16, 64, 256, 1024)
_FEW_DECODES = 16  # beside prompts: attention with room for 256 takes 12 µs a layer for 3 of them
_DECODE_STEP = 256  # beyond the last capacity
_FEW_ROWS = 96  # up to here products depend on the number of rows in more ways than one


def row_sizes(num_rows: int) -> list[int]:
    """Padded numbers of rows, the last at least ``num_rows``: steps of a quarter at most, and of 64 beyond 256."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    while sizes[-1] < num_rows:
        sizes.append(sizes[-1] + (64 if sizes[-1] < 1024 else 256))
    return sizes[: bisect_left(sizes, num_rows) + 1]


class GraphShapes:
    """Which shapes are captured, and which one a batch takes.

    Args:
        num_rows: Most running requests.
        max_tokens: Most tokens of one batch.

    Attributes:
        max_padded_rows: Rows of the largest sample shape, and of the largest of decode rows alone.
        max_padded_tokens: No forward shape, captured or not, has more tokens.
        largest_forward: No forward shape, captured or not, has more of anything.
    """

    def __init__(self, num_rows: int, max_tokens: int) -> None:
        self._rows = row_sizes(num_rows)
        self._tokens = [size for size in _MIXED_TOKENS if size <= max_tokens]
        self.max_padded_rows = self._rows[-1]
        self.max_padded_tokens = max(max_tokens, self.max_padded_rows)
        self.largest_forward = ForwardShape(
            self.max_padded_tokens,
            _decode_capacity(self.max_padded_rows),
            -(-num_rows // CHUNKS_PER_LAUNCH) * CHUNKS_PER_LAUNCH,
        )

    @property
    def all(self) -> Iterable[ForwardShape | SampleShape]:
        """All shapes, the largest of each kind first, so that the smaller ones find their memory allocated."""
        return chain(self._forward, self._sample)

    @property
    def _forward(self) -> Iterable[ForwardShape]:
        decode = (self._decode(rows) for rows in reversed(self._rows))
        mixed = (self._mixed(tokens, room) for tokens in reversed(self._tokens) for room in (tokens, _FEW_DECODES, 0))
        return chain(decode, dict.fromkeys(mixed))

    @staticmethod
    def _decode(num_rows: int) -> ForwardShape:
        return ForwardShape(num_rows, _decode_capacity(num_rows), 0)

    def _mixed(self, num_tokens: int, decode_room: int) -> ForwardShape:
        """Give a shape with room for no decode rows, for few, or, if few are not enough, for all there can be."""
        max_decode = min(num_tokens, self.max_padded_rows) if decode_room else 0
        capacity = _decode_capacity(max_decode if decode_room > _FEW_DECODES else min(max_decode, _FEW_DECODES))
        return ForwardShape(num_tokens, capacity, CHUNKS_PER_LAUNCH)

    @property
    def largest(self) -> list[ForwardShape | SampleShape]:
        """The shapes that between them take the most memory."""
        decode = [self._decode(rows) for rows in _peaks(self._rows)]
        mixed = [self._mixed(tokens, tokens) for tokens in _peaks(self._tokens)]
        sample = [SampleShape(self.max_padded_rows, sampling) for sampling in Sampling]
        return [*decode, *mixed, *sample]

    @property
    def largest_apart(self) -> ForwardShape:
        """The shape, captured or not, with most tokens whose gate and up are not multiplied in the kernel of both."""
        return replace(self.largest_forward, num_tokens=min(self.max_padded_tokens, FUSED_ROWS - 1))

    @property
    def to_compile(self) -> Iterable[ForwardShape | SampleShape]:
        """Few shapes that between them need every kernel of any batch, those first that take long to compile."""
        rows = [size for size in self._rows if size <= _FEW_ROWS or size in (*_DECODE_CAPACITIES, self.max_padded_rows)]
        decode = [self._decode(size) for size in rows]
        capacities = [capacity for capacity in _DECODE_CAPACITIES if capacity <= self.largest_forward.num_decode]
        mixed = [ForwardShape(size, room, CHUNKS_PER_LAUNCH) for size in _peaks(self._tokens) for room in capacities]
        gathering = [replace(shape, gather_lens=(1024,)) for shape in mixed[-1:]]
        few = [self._mixed(tokens, 0) for tokens in self._tokens if tokens <= MAX_ROWS]
        sample = [SampleShape(size, sampling) for sampling in reversed(Sampling) for size in rows]
        return [*sample, *decode, *mixed, *gathering, *few, self.largest_apart]

    @property
    def count(self) -> int:
        """How many shapes are captured."""
        return len(list(self.all))

    @property
    def _sample(self) -> Iterable[SampleShape]:
        return (SampleShape(rows, sampling) for rows in reversed(self._rows) for sampling in reversed(Sampling))

    def forward_of(self, batch: HostBatch) -> ForwardShape | None:
        """Choose the smallest captured shape that a batch fits; None if there is none."""
        if batch.num_chunks == 0:
            size = _at_least(self._rows, batch.num_tokens)
            return None if size is None else self._decode(size)
        size = _at_least(self._tokens, batch.num_tokens)
        if size is None or batch.num_chunks > CHUNKS_PER_LAUNCH:
            return None
        return self._mixed(size, batch.num_decode)

    def sample_of(self, num_sampled: int, sampling: Sampling) -> SampleShape:
        """Choose the smallest captured shape that so many rows fit; they are at most ``num_rows``."""
        return SampleShape(self._rows[bisect_left(self._rows, num_sampled)], sampling)


def eager_shape(batch: HostBatch) -> ForwardShape:
    """Give the shape of a batch that no captured one fits."""
    chunk_lens = batch.extend_lens[batch.num_decode :].tolist()
    seq_lens = batch.seq_lens[batch.num_decode :].tolist()
    num_launches = -(-batch.num_chunks // CHUNKS_PER_LAUNCH)
    launches = [slice(i * CHUNKS_PER_LAUNCH, (i + 1) * CHUNKS_PER_LAUNCH) for i in range(num_launches)]
    return ForwardShape(
        batch.num_tokens,
        _decode_capacity(batch.num_decode),
        num_launches * CHUNKS_PER_LAUNCH,
        tuple(gather_len_for(chunk_lens[launch], seq_lens[launch]) for launch in launches),
    )


def _decode_capacity(num_decode: int) -> int:
    if num_decode > _DECODE_CAPACITIES[-1]:
        return -(-num_decode // _DECODE_STEP) * _DECODE_STEP
    return _DECODE_CAPACITIES[bisect_left(_DECODE_CAPACITIES, num_decode)] if num_decode else 0


def _peaks(sizes: list[int]) -> list[int]:
    """Give the largest size, and the largest whose gate and up leave two products in memory."""
    return sorted({*sizes[-1:], *[size for size in sizes if size < FUSED_ROWS][-1:]}, reverse=True)


def _at_least(sizes: list[int], size: int) -> int | None:
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None
