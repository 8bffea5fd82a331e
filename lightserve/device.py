"""Which device the model runs on, found without importing torch: the launcher must start at once."""

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from lightserve.errors import ConfigError

Device: TypeAlias = Literal["cpu", "cuda"]


def resolve_device(asked: Literal["auto", "cpu", "cuda"], tp: int) -> Device:
    """Choose the device: a GPU if there is one and torch was built for it, unless the operator says otherwise.

    Raises:
        ConfigError: ``--device cuda`` without a usable GPU, or ``--tp`` beyond the GPUs there are.
    """
    if asked == "cpu":
        return "cpu"
    num_gpus = _count_gpus()
    if not _torch_is_built_for_cuda() or num_gpus == 0:
        if asked == "auto":
            return "cpu"
        why = "the NVIDIA driver shows none" if num_gpus == 0 else "the installed torch is a CPU build"
        raise ConfigError(f"--device cuda: no usable GPU: {why}")
    if tp > num_gpus:
        raise ConfigError(f"--tp {tp} needs {tp} GPUs; there are {num_gpus}")
    return "cuda"


def _count_gpus() -> int:
    """GPUs that the driver shows to this process; respects CUDA_VISIBLE_DEVICES. Makes no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _torch_is_built_for_cuda() -> bool:
    spec = find_spec("torch")  # does not import it
    folders = (spec.submodule_search_locations or []) if spec else []
    return any(Path(folder, "lib", "libtorch_cuda.so").exists() for folder in folders)
