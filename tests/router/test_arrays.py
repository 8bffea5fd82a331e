"""Tables of a row for each request."""

import errno
import mmap
import subprocess
import sys

import numpy as np
import pytest

from lightserve.router.arrays import row_table

# Another process: the most memory that this one ever had may be more than enough.
GROWTH = """
import resource
from lightserve.router.batch import Batch
def most_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = most_kib()
batch = Batch(1024, 131_072)
batch.ids[:, :100] = batch.slots[:, :100] = 1
print(most_kib() - before)
"""


def test_a_table_is_zeros_that_can_be_written() -> None:
    table = row_table(3, 5)
    assert table.shape == (3, 5)
    assert table.dtype == np.int32
    assert not table.any()
    table[2, 4] = -7
    assert table.sum() == -7


def test_a_table_may_be_empty() -> None:
    assert row_table(0, 5).shape == (0, 5)


def test_a_kernel_without_large_pages_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldMemory(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("lightserve.router.arrays.mmap.mmap", OldMemory)
    assert row_table(3, 5).shape == (3, 5)


def test_what_requests_of_a_long_context_do_not_write_takes_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 50_000  # of the 1,048,576 KiB of both tables
