"""Where a GPU's memory went, measured at the driver, which also sees what the framework does not."""

import torch

from lightserve.model_worker.kv_cache import GIB


class MemoryLedger:
    """A GPU's memory, entry by entry, from the moment this is made.

    Args:
        device: The GPU; its context exists.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free, self._total = torch.cuda.mem_get_info(device)
        self._entries = [("in use before", self._total - self._free)]
        self._set_aside_bytes = 0

    @property
    def total_bytes(self) -> int:
        """All of the GPU's memory."""
        return self._total

    @property
    def free_bytes(self) -> int:
        """What no entry claims."""
        return self._free

    def enter(self, name: str) -> int:
        """Enter what has gone since the last entry, and return it."""
        torch.cuda.synchronize(self._device)
        gone = self._free + self._set_aside_bytes - torch.cuda.mem_get_info(self._device)[0]
        self._claim(name, gone)
        return gone

    def set_aside(self, name: str, num_bytes: int) -> None:
        """Enter what will be needed later."""
        self._set_aside_bytes += num_bytes
        self._claim(name, num_bytes)

    def _claim(self, name: str, num_bytes: int) -> None:
        self._free -= num_bytes
        self._entries.append((name, num_bytes))

    def describe(self) -> str:
        """Give the arithmetic in words."""
        claims = "".join(f" - {num_bytes / GIB:.2f} {name}" for name, num_bytes in self._entries)
        return f"{self._total / GIB:.2f} GiB of the GPU{claims}"
