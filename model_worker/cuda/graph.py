"""CUDA graphs: launches captured once, then replayed by one call."""

from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch it."""


class Capturer(Protocol):
    """Captures work."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Make ``work`` ready for replay, having run it once where that compiles what it uses."""


class CudaCapturer:
    """Captures CUDA graphs that share one pool of memory: they never run at the same time.

    Args:
        stream: Where they are captured and replayed; not the default stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run ``work`` once, then capture it."""
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
