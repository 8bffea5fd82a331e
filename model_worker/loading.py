"""From the boot facts to an engine that is ready."""

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal

import torch

from lightserve.boot import Boot
from lightserve.model_config import DtypeName
from lightserve.model_worker.engine import Engine, RunnerT
from lightserve.model_worker.kv_cache import PoolSize
from lightserve.tokenizer import Tokenizer

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedEngine(Generic[RunnerT]):
    """An engine and what the router must know of it."""

    engine: Engine[RunnerT]
    pool: PoolSize


def resolve_dtype(asked: Literal["auto"] | DtypeName, checkpoint: DtypeName) -> torch.dtype:
    """Choose the number format of weights, activations and cache: the checkpoint's unless another is asked for."""
    return _DTYPES[checkpoint if asked == "auto" else asked]


def sampled_vocab_size(boot: Boot) -> int:
    """Ids that may be sampled: those that the model has a logit for and the tokenizer a text."""
    return min(boot.model.vocab_size, Tokenizer.load(Path(boot.tokenizer_dir)).vocab_size)
