"""Compile kernels on many threads before they are first needed.

A launch compiles what it launches, one kernel after the other, each for most of a second or more. Within
``compiling_ahead`` launches only hand their kernels to threads; at its end all are compiled.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction


@contextmanager
def compiling_ahead(num_threads: int) -> Iterator[None]:
    """Let launches compile, but not run, until the end of the block; for kernels that are not interpreted."""
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    with ThreadPoolExecutor(num_threads, "compile") as threads, AsyncCompileMode(threads):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run
