"""From the boot facts to an engine that is ready: ranks met, weights loaded, pool sized, a first step run."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lightserve.boot import Boot
from lightserve.model_config import DtypeName, ModelConfig
from lightserve.model_worker.engine import Engine
from lightserve.model_worker.host import free_host_bytes, num_usable_cpus
from lightserve.model_worker.kv_cache import GIB, KVCache, PoolSize, size_pool, slot_bytes
from lightserve.model_worker.layers.backend import has_native_bfloat16
from lightserve.model_worker.layers.cpu_backend import CpuBackend
from lightserve.model_worker.layers.sampling_cpu import CpuSamplingOps
from lightserve.model_worker.models.llama import LlamaModel
from lightserve.model_worker.req_rows import ReqRows
from lightserve.model_worker.sampler import Sampler
from lightserve.model_worker.tensor_parallel import Ranks, join_ranks
from lightserve.model_worker.weights.loader import load_weights
from lightserve.model_worker.weights.sharding import Shard
from lightserve.tokenizer import Tokenizer

# On a CPU the pool shares the memory with all else on the machine: by default it takes half of what is free, and no
# more than 4 GiB. Asked for by hand, it may take nearly all; the rest is for the largest step's activations.
_CPU_DEFAULT_FRAC = 0.5
_CPU_DEFAULT_MAX_BYTES = 4 * GIB
_CPU_MAX_FRAC = 0.85

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what the router must know of it."""

    engine: Engine
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


def load_engine(boot: Boot, rank: int) -> LoadedEngine:
    """Load one rank.

    Raises:
        ConfigError: The model, the number of ranks or the number of slots does not fit.
    """
    config = boot.config
    device = torch.device(boot.device)
    set_num_threads(config.tp)
    dtype = resolve_dtype(config.dtype, boot.model.dtype, device)
    vocab_size = Tokenizer.load(Path(boot.tokenizer_dir)).vocab_size
    ranks = join_ranks(boot.run_dir, rank, config.tp, device)
    model = load_model(boot.model, ranks, device=device, dtype=dtype, load_format=config.load_format)
    pool = _size_cpu_pool(boot, slot_bytes(boot.model.num_layers, model.num_kv_heads, boot.model.head_dim, dtype))
    limits = EngineLimits(pool.num_slots, config.running_max_req_size, boot.max_req_total_len, vocab_size)
    return LoadedEngine(make_engine(boot.model, model, limits, device=device, dtype=dtype), pool)


def load_model(
    config: ModelConfig, ranks: Ranks, *, device: torch.device, dtype: torch.dtype, load_format: str
) -> LlamaModel:
    """Load this rank's weights and lay them out for the device.

    Raises:
        ConfigError: The model's files or the number of ranks do not fit.
    """
    rank, world_size = ranks.rank, ranks.world_size
    shard = Shard.of(config, rank, world_size)
    weights = load_weights(
        config, rank=rank, world_size=world_size, device=device, dtype=dtype, load_format=load_format
    )
    backend = CpuBackend(config.rope, head_dim=config.head_dim, num_kv_heads=len(shard.kv_heads), dtype=dtype)
    with torch.inference_mode():
        return LlamaModel(config, weights, shard, backend=backend, ranks=ranks)


def make_engine(
    config: ModelConfig, model: LlamaModel, limits: EngineLimits, *, device: torch.device, dtype: torch.dtype
) -> Engine:
    """Give a model its cache, its rows and its sampler."""
    kv_cache = KVCache(
        limits.num_slots,
        num_layers=config.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )
    rows = ReqRows(limits.num_rows, limits.max_req_total_len, device)
    vocab_size = min(config.vocab_size, limits.vocab_size)
    sampler = Sampler(limits.num_rows, vocab_size, config.eos_token_ids, ops=CpuSamplingOps(), device=device)
    return Engine(model, kv_cache, rows, sampler, may_split=model.world_size == 1)


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


def set_num_threads(num_ranks: int) -> None:
    """Share the CPUs of this process among the ranks; ``OMP_NUM_THREADS`` overrules it."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_usable_cpus() // num_ranks))


def _size_cpu_pool(boot: Boot, bytes_per_slot: int) -> PoolSize:
    free_bytes = free_host_bytes() // boot.config.tp
    return size_pool(
        boot.config.max_total_token_num,
        free_bytes=int(free_bytes * _CPU_MAX_FRAC),
        default_bytes=int(min(free_bytes * _CPU_DEFAULT_FRAC, _CPU_DEFAULT_MAX_BYTES // boot.config.tp)),
        bytes_per_slot=bytes_per_slot,
        most_useful=boot.config.running_max_req_size * boot.max_req_total_len,
    )
