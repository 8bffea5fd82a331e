"""The arrays that the router's parts hand one another, one-dimensional, and those of a row for each request."""

import mmap
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IdArray: TypeAlias = npt.NDArray[np.int32]
SlotArray: TypeAlias = npt.NDArray[np.int32]
RowArray: TypeAlias = npt.NDArray[np.int32]
FinishArray: TypeAlias = npt.NDArray[np.uint8]  # of ``FinishCode``
BoolArray: TypeAlias = npt.NDArray[np.bool_]
IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]


def row_table(num_rows: int, width: int) -> npt.NDArray[np.int32]:
    """Make [num_rows, width] int32 zeros, of which memory is taken for what is written alone.

    NumPy would ask the system for pages of 2 MiB, of which four rows of 131,072 share one: what one request of each row
    writes at its front would take all of the table, half a gigabyte for 1,024 rows.
    """
    num_bytes = num_rows * width * np.dtype(np.int32).itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux's
        with suppress(OSError):  # a kernel that was built without large pages does not know the word
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.int32, count=num_rows * width).reshape(num_rows, width)
