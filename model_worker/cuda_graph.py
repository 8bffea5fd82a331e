"""CUDA graphs: a step's launches recorded once for each padded shape, then replayed by one call.

Shapes are spaced so that padding costs little: below 256 rows a product is bound by reading its weight, above it grows
with the rows, in steps of the library's tiles. A batch that no shape has room for is launched kernel by kernel.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Protocol

import torch

from lightserve.kernels.prefill_attention import MAX_GATHER_LEN, gather_len
from lightserve.model_worker.forward_batch import HostBatch
from lightserve.model_worker.step_inputs import ForwardShape, Sampling, TailShape

_MIXED_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
_MIXED_CHUNKS = 64
# Rows and chunks of a batch without a graph are padded to powers of two, so that few kernels have to be compiled; the
# largest kernel serves all sizes above it.
_EAGER_LEAST, _EAGER_STEP_FROM, _EAGER_STEP = 16, 1024, 256


def row_sizes(num_rows: int) -> list[int]:
    """Padded numbers of rows, the last at least ``num_rows``: steps of a quarter at most, and of 64 beyond 256."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    while sizes[-1] < num_rows:
        sizes.append(sizes[-1] + (64 if sizes[-1] < 1024 else 256))
    return sizes[: bisect_left(sizes, num_rows) + 1]


class GraphShapes:
    """Which shapes are recorded, and which one a batch takes.

    Args:
        num_rows: Most running requests.
        max_tokens: Most tokens of one batch.

    Attributes:
        most_rows: Rows of the largest tail shape.
        most_tokens: No forward shape, recorded or not, has more tokens.
        largest_forward: No forward shape, recorded or not, has more of anything.
    """

    def __init__(self, num_rows: int, max_tokens: int) -> None:
        self._rows = row_sizes(num_rows)
        self._tokens = [size for size in _MIXED_TOKENS if size <= max_tokens]
        self.most_rows = self._rows[-1]
        self.most_tokens = max(max_tokens, self.most_rows, _eager_size(num_rows))
        self.largest_forward = ForwardShape(
            self.most_tokens,
            max(_eager_size(num_rows), self.most_rows),
            max(_eager_size(num_rows), _MIXED_CHUNKS),
            MAX_GATHER_LEN,
        )

    @property
    def all(self) -> Iterable[ForwardShape | TailShape]:
        """All shapes, the largest of each kind first, so that the smaller ones find their memory allocated."""
        return chain(self._forward, self._tail)

    @property
    def _forward(self) -> Iterable[ForwardShape]:
        decode = (ForwardShape(rows, rows, 0) for rows in reversed(self._rows))
        mixed = (ForwardShape(tokens, tokens, _MIXED_CHUNKS) for tokens in reversed(self._tokens))
        prefill = (ForwardShape(tokens, 0, _MIXED_CHUNKS) for tokens in reversed(self._tokens))
        return chain(decode, mixed, prefill)

    @property
    def largest(self) -> list[ForwardShape | TailShape]:
        """The shapes that between them take the most memory."""
        mixed = [ForwardShape(self._tokens[-1], self._tokens[-1], _MIXED_CHUNKS)] if self._tokens else []
        tails = [TailShape(self.most_rows, sampling) for sampling in Sampling]
        return [ForwardShape(self.most_rows, self.most_rows, 0), *mixed, *tails]

    @property
    def count(self) -> int:
        """How many shapes are recorded."""
        return len(list(self.all))

    @property
    def _tail(self) -> Iterable[TailShape]:
        return (TailShape(rows, sampling) for rows in reversed(self._rows) for sampling in reversed(Sampling))

    def forward_of(self, batch: HostBatch) -> ForwardShape | None:
        """Choose the smallest recorded shape that a batch fits; None if there is none."""
        if batch.num_chunks == 0:
            size = _at_least(self._rows, batch.num_tokens)
            return None if size is None else ForwardShape(size, size, 0)
        size = _at_least(self._tokens, batch.num_tokens)
        if size is None or batch.num_chunks > _MIXED_CHUNKS:
            return None
        return ForwardShape(size, size if batch.num_decode else 0, _MIXED_CHUNKS)

    def tail_of(self, num_sampled: int, sampling: Sampling) -> TailShape:
        """Choose the smallest recorded shape that so many rows fit; they are at most ``num_rows``."""
        return TailShape(self._rows[bisect_left(self._rows, num_sampled)], sampling)


def eager_shape(batch: HostBatch) -> ForwardShape:
    """Give the shape of a batch that no recorded one fits."""
    chunk_lens, seq_lens = batch.extend_lens[batch.num_decode :], batch.seq_lens[batch.num_decode :]
    num_decode = _eager_size(batch.num_decode)
    return ForwardShape(
        max(batch.num_tokens, num_decode),  # every decode row that there is room for reads a token's query
        num_decode,
        _eager_size(batch.num_chunks),
        gather_len(chunk_lens.tolist(), seq_lens.tolist()),
    )


def eager_shapes(num_rows: int) -> Iterable[ForwardShape]:
    """List small shapes that between them need every kernel that a batch without a graph can need."""
    size = _EAGER_LEAST
    while size <= min(_eager_size(num_rows), _EAGER_STEP_FROM):
        yield ForwardShape(size, size, size)
        size *= 2


def _eager_size(num: int) -> int:
    if num > _EAGER_STEP_FROM:
        return -(-num // _EAGER_STEP) * _EAGER_STEP
    return max(_EAGER_LEAST, 1 << (num - 1).bit_length()) if num else 0


def _at_least(sizes: list[int], size: int) -> int | None:
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Launch it."""


class Recorder(Protocol):
    """Records work."""

    def record(self, work: Callable[[], None]) -> Graph:
        """Make ``work`` ready for replay, having run it once where that compiles what it uses."""


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: they never run at the same time.

    Args:
        stream: Where they are recorded and replayed; not the default stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run ``work`` once, then record it."""
        with torch.cuda.stream(self._stream):
            work()
            graph = torch.cuda.CUDAGraph()
            # torch.cuda.graph() would also give all unused memory back to the driver, every time.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph


class PlainRecorder:
    """Records nothing: replaying is running. For devices without graphs, and to look for a fault in them."""

    def record(self, work: Callable[[], None]) -> Graph:
        """Run ``work`` at each replay."""
        return _PlainGraph(work)


class _PlainGraph:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work
