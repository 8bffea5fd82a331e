"""From the host to the device without waiting for the device."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy ``values``; work queued on the device's stream from now on sees them, and the host goes on at once."""
    copied = torch.from_numpy(np.array(values))
    if device.type == "cpu":
        return copied
    # Torch keeps the pinned memory until the copy is done.
    return copied.pin_memory().to(device, non_blocking=True)
