"""From files to the device: worker threads read and dequantise, one thread copies on."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from lightserve.model_worker.host import num_usable_cpus
from lightserve.model_worker.weights.layout import Piece
from lightserve.model_worker.weights.tensor_source import TensorSource

_MAX_THREADS = 8
_WIDEST_BYTES = 4  # of a number as it is read: float32
_SPARE_BUFFERS = 4  # copies that may be on their way to the GPU while the threads fill the other buffers


class Buffers(Protocol):
    """Memory through which a piece passes on its way; None where it needs no such detour."""

    def take(self) -> torch.Tensor | None:
        """Return a buffer that nobody uses, [num_bytes] uint8."""

    def give(self, buffer: torch.Tensor | None) -> None:
        """Take back a buffer whose copy to the device has just been queued."""


def transfer(
    source: TensorSource, pieces: Sequence[Piece], device: torch.device, on_bytes: Callable[[int], None]
) -> None:
    """Fill every piece's target.

    Args:
        source: Where the numbers are.
        pieces: What to copy, none of them large.
        device: Where all the targets are.
        on_bytes: Told the size of each target that has been filled.
    """
    num_threads = min(_MAX_THREADS, num_usable_cpus())
    depth = 2 * num_threads
    if device.type == "cuda":
        largest = max(piece.target.numel() for piece in pieces) * _WIDEST_BYTES
        transfer_through(_PinnedBuffers(depth + _SPARE_BUFFERS, largest, device), source, pieces, num_threads, on_bytes)
        torch.cuda.synchronize(device)
    else:
        transfer_through(NoBuffers(), source, pieces, num_threads, on_bytes)


def transfer_through(
    buffers: Buffers,
    source: TensorSource,
    pieces: Iterable[Piece],
    num_threads: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Fill every piece's target, reading on ``num_threads`` threads and copying on this one.

    At most twice as many pieces as threads have been read but not copied, so that host memory stays bounded.
    """
    waiting: deque[tuple[Piece, torch.Tensor | None, Future[torch.Tensor]]] = deque()

    def land() -> None:
        piece, buffer, future = waiting.popleft()
        # A dtype that differs is converted on the device.
        piece.target.copy_(future.result().to(piece.target.device, non_blocking=True))
        buffers.give(buffer)
        on_bytes(piece.target.nbytes)

    with ThreadPoolExecutor(num_threads, "weights") as pool:
        for piece in pieces:
            buffer = buffers.take()
            waiting.append((piece, buffer, pool.submit(_fetch, source, piece, buffer)))
            if len(waiting) == 2 * num_threads:
                land()
        while waiting:
            land()


def _fetch(source: TensorSource, piece: Piece, buffer: torch.Tensor | None) -> torch.Tensor:
    numbers = source.read(piece)
    if buffer is None:
        return numbers
    staged = buffer[: numbers.nbytes].view(numbers.dtype).view(numbers.shape)
    # NumPy copies on this thread alone; torch would start its own threads under each of ours.
    np.copyto(_as_bytes(staged), _as_bytes(numbers))
    return staged


def _as_bytes(tensor: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return tensor.view(torch.uint8).numpy()


class NoBuffers:
    """The CPU copies straight from what was read."""

    def take(self) -> None:
        """Return nothing."""

    def give(self, buffer: torch.Tensor | None) -> None:
        """Take nothing back."""


class _PinnedBuffers:
    """A fixed set of page-locked buffers, from which a GPU copies while the CPU goes on."""

    def __init__(self, count: int, num_bytes: int, device: torch.device) -> None:
        self._free = deque(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(count))
        self._leaving: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._device = device

    def take(self) -> torch.Tensor:
        if self._free:
            return self._free.popleft()
        event, buffer = self._leaving.popleft()
        event.synchronize()
        return buffer

    def give(self, buffer: torch.Tensor | None) -> None:
        if buffer is None:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
        event.record(torch.cuda.current_stream(self._device))
        self._leaving.append((event, buffer))
