"""Compiling before launching."""

import pytest
from triton.runtime.jit import JITFunction

from lightserve.kernels.compile_ahead import compiling_ahead


def fail_in_block() -> None:
    with compiling_ahead(1):
        raise ValueError("why")


def test_launches_run_again_after_the_block_however_it_ends() -> None:
    run = JITFunction.run
    with compiling_ahead(1):
        assert JITFunction.run is not run
    assert JITFunction.run is run
    with pytest.raises(ValueError, match="why"):
        fail_in_block()
    assert JITFunction.run is run
