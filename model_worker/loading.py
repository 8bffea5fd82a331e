"""From the boot facts to an engine that is ready."""

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal

import torch

from lightserve.boot import Boot
from lightserve.model_config import DtypeName
from lightserve.model_worker.engine import Engine, RunnerT
from lightserve.model_worker.kv_cache import PoolSize
from lightserve.model_worker.layers.backend import has_native_bfloat16
from lightserve.tokenizer import Tokenizer

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedEngine(Generic[RunnerT]):
    """An engine and what the router must know of it."""

    engine: Engine[RunnerT]
    pool: PoolSize


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Sizes of an engine's state.

    Attributes:
        num_slots: Slots of the KV cache.
        num_rows: Most running requests.
        max_req_total_len: Most tokens of one request.
        vocab_size: Ids that have text.
    """

    num_slots: int
    num_rows: int
    max_req_total_len: int
    vocab_size: int


def resolve_dtype(asked: Literal["auto"] | DtypeName, checkpoint: DtypeName, device: torch.device) -> torch.dtype:
    """Choose the number format of weights, activations and cache.

    Unless the operator says otherwise it is the checkpoint's; on a CPU, bfloat16 only where the CPU multiplies it in
    hardware, and float32 in place of float16, which hardly any does.
    """
    if asked != "auto":
        return _DTYPES[asked]
    if device.type == "cpu" and not (checkpoint == "bfloat16" and has_native_bfloat16()):
        return torch.float32
    return _DTYPES[checkpoint]


def sampled_vocab_size(boot: Boot) -> int:
    """Ids that may be sampled: those that the model has a logit for and the tokenizer a text."""
    return min(boot.model.vocab_size, Tokenizer.load(Path(boot.tokenizer_dir)).vocab_size)
