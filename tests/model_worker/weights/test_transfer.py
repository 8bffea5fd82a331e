from collections.abc import Collection

import pytest
import torch

from lightserve.model_worker.weights.layout import Piece
from lightserve.model_worker.weights.transfer import transfer_through

NUM_THREADS = 3


class MemorySource:
    origin = "memory"

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def names(self) -> Collection[str]:
        return ["t"]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def read(self, piece: Piece) -> torch.Tensor:
        if piece.name != "t":
            raise OSError("gone")
        block = self._tensor[piece.rows.start : piece.rows.stop]
        return block if piece.columns is None else block[:, piece.columns.start : piece.columns.stop]


class CountedBuffers:
    """Plain memory in place of page-locked memory; scribbles over a buffer as soon as it is given back."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.num_taken = 0
        self.most_taken = 0

    def take(self) -> torch.Tensor:
        self.num_taken += 1
        self.most_taken = max(self.most_taken, self.num_taken)
        return torch.empty(self._num_bytes, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor | None) -> None:
        if buffer is None:
            raise ValueError("no buffer")
        self.num_taken -= 1
        buffer.fill_(255)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [range(24), range(8, 16)])
def test_pieces_pass_through_a_bounded_number_of_buffers(dtype: torch.dtype, columns: range) -> None:
    stored = torch.randn(50, 24).to(dtype)
    target = torch.full((50, len(columns)), torch.nan)
    whole = Piece("t", (50, 24), range(50), columns, target)
    buffers = CountedBuffers(1024)
    arrived: list[int] = []
    transfer_through(buffers, MemorySource(stored), whole.split(64, multiple=2), NUM_THREADS, arrived.append)
    torch.testing.assert_close(target, stored[:, columns.start : columns.stop].float(), rtol=0, atol=0)
    assert sum(arrived) == target.nbytes
    assert buffers.num_taken == 0
    assert buffers.most_taken <= 2 * NUM_THREADS


def test_a_read_that_fails_ends_the_transfer_with_its_error() -> None:
    piece = Piece("u", (4,), range(4), None, torch.empty(4))
    with pytest.raises(OSError, match="gone"):
        transfer_through(CountedBuffers(64), MemorySource(torch.ones(4)), [piece], NUM_THREADS, lambda _: None)


def test_a_split_keeps_whole_heads_together() -> None:
    piece = Piece("t", (96, 8), range(32, 96), range(8), torch.empty(64, 8))
    parts = list(piece.split(max_elements=40 * 8, multiple=16))
    assert [part.rows for part in parts] == [range(32, 64), range(64, 96)]
    assert [len(part.target) for part in parts] == [32, 32]
