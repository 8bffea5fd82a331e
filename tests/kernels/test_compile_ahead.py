"""Compiling before launching."""

import pytest
from triton.runtime.jit import JITFunction

from lightserve.kernels.compile_ahead import compiling_ahead


def test_launches_run_again_after_the_block_however_it_ends() -> None:
    run = JITFunction.run
    with pytest.raises(ValueError, match="why"), compiling_ahead(1):
        assert JITFunction.run is not run
        raise ValueError("why")
    assert JITFunction.run is run
