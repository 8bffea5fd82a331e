"""The number format that suits a CPU."""

from typing import Literal

import torch

from lightserve.model_config import DtypeName
from lightserve.model_worker.loading import resolve_dtype


def resolve_cpu_dtype(asked: Literal["auto"] | DtypeName, checkpoint: DtypeName) -> torch.dtype:
    """Choose the number format of weights, activations and cache.

    Unless the operator says otherwise it is bfloat16 where the checkpoint is and the CPU multiplies it in hardware, and
    else float32, also in place of float16, which hardly any CPU multiplies.
    """
    if asked == "auto" and not (checkpoint == "bfloat16" and has_native_bfloat16()):
        return torch.float32
    return resolve_dtype(asked, checkpoint)


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, or Arm's BF16)."""
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") == "x86_64":
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return bool(capabilities.get("bf16"))
