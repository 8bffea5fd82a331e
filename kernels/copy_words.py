"""Copy words: out = words, from page-locked host memory to the device.

The copy engine would do it as well, but takes its turn between the kernels of two steps: 8 to 15 µs pass until the next
kernel begins. A kernel that reads the host's memory itself is one more in the row.
"""

import torch
import triton
import triton.language as tl

from lightserve.kernels.checks import check_contiguous
from lightserve.kernels.launch import dependent_launch, wait_for_previous


def copy_words_reference(words: torch.Tensor, *, out: torch.Tensor) -> None:
    """Do what ``copy_words`` does, in plain torch."""
    out.copy_(words)


def copy_words(words: torch.Tensor, *, out: torch.Tensor) -> None:
    """Copy words to the device; they are read when the kernel runs.

    Args:
        words: [n] int32 contiguous, in page-locked host memory or on the device.
        out: [n] int32 contiguous, on the device, written.

    Raises:
        ValueError: A shape does not fit, or what must be contiguous is not.
    """
    n = len(words)
    check_contiguous((n,), words=words, out=out)
    if n:
        _copy_words_kernel[(triton.cdiv(n, BLOCK),)](words, out, n, BLOCK=BLOCK, num_warps=4, **dependent_launch(out))


BLOCK = 1024  # 8 words per thread, all on their way at once: a word takes 1 to 2 µs from the host


@triton.jit(do_not_specialize=["n"])
def _copy_words_kernel(words, out, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    wait_for_previous(PDL)
    # .cg: the host writes them anew for each step, so the first-level cache is no place to look
    tl.store(out + index, tl.load(words + index, mask=inside, cache_modifier=".cg"), mask=inside)
