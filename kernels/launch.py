"""What the launches of all kernels share: programmatic dependent launch, where the device has it.

A kernel launched so may start while the one before it still drains. Each program of it first reads what no kernel
writes (weights), or what was written at least two kernels ago (plans), then calls ``wait_for_previous``: everything
earlier on the stream is complete after that. The next kernel is let in right behind the wait, never before it, so that
at most two kernels are in flight. At 8B's decode step of one row that saves 6 % of the time.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Say whether kernels on this device may be launched before their predecessor has ended (Hopper and later)."""
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Say whether there is a tensor memory accelerator (Hopper and later); interpreted kernels do as if."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def fits_tma(matrix: torch.Tensor) -> bool:
    """Say whether that can copy tiles of a matrix: begin and rows at multiples of 16 bytes."""
    row_bytes = matrix.stride(0) * matrix.itemsize
    return row_bytes > 0 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0


def dependent_launch(x: torch.Tensor) -> dict[str, bool]:
    """Give the launch arguments that go with ``wait_for_previous`` on the device of ``x``."""
    return {"PDL": True, "launch_pdl": True} if has_dependent_launch(x.device) else {"PDL": False}


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Count the device's multiprocessors; 1 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def prefetch(addresses, PDL: tl.constexpr):
    """Fetch the lines at a few addresses into the second-level cache, while the kernel still waits."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernel before this one has ended, then let the next one start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
