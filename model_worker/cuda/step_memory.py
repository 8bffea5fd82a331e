"""Page-locked memory of one step in flight: what it reads, what it brings back, and whether it is done."""

import numpy as np
import torch

from lightserve.errors import InvariantError


class StepMemory:
    """Memory of one step in flight.

    Kernels read and write it themselves, so that no copy engine takes its turn between two steps.

    Args:
        result_row: Which row of the results is its own.
        num_words: Words that a step reads at most.
        results: [2 · most sampled rows] int32, on the host: what a step leaves there.
        device: The GPU; on a CPU there is nothing to wait for.

    Attributes:
        result_row: Which row of the results is its own.
        pinned_words: [num_words] int32, what the step reads.
        words: The same memory as NumPy sees it.
    """

    def __init__(self, result_row: int, num_words: int, results: torch.Tensor, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.result_row = result_row
        self.pinned_words = torch.zeros(num_words, dtype=torch.int32, pin_memory=on_gpu)
        self.words = self.pinned_words.numpy()
        self._results = results.numpy()
        self._num_results = 0
        self._done = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]  # torch gives it no types
        self._step_id = -1

    def take(self, step_id: int, num_sampled: int) -> None:
        """Give the memory to a step with room for so many sampled rows; waits until the one before is done with it."""
        if self._done is not None:
            self._done.synchronize()
        self._step_id = step_id
        self._num_results = 2 * num_sampled

    def mark(self) -> None:
        """Note where the step's work ends."""
        if self._done is not None:
            self._done.record()

    def is_done(self, step_id: int) -> bool:
        """Tell whether a step's work has ended; its memory may have been given to another since."""
        if step_id != self._step_id or self._done is None:
            return True
        return bool(self._done.query())  # type: ignore[no-untyped-call]  # torch gives it no types

    def read(self, step_id: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
        """Wait for a step and give its results, [2, n].

        Raises:
            InvariantError: The memory has been given to another step since.
        """
        if step_id != self._step_id:
            raise InvariantError(f"the results of step {step_id} have given way to those of step {self._step_id}")
        if self._done is not None:
            self._done.synchronize()
        return self._results[: self._num_results].reshape(2, -1)
