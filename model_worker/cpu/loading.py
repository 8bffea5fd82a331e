"""A CPU engine: ranks met, weights loaded and laid out, pool sized."""

import os
from dataclasses import dataclass

import torch

from lightserve.boot import Boot
from lightserve.model_config import ModelConfig
from lightserve.model_worker.cpu.backend import CpuBackend
from lightserve.model_worker.cpu.dtype import resolve_cpu_dtype
from lightserve.model_worker.cpu.memory import reserved_bytes
from lightserve.model_worker.cpu.runner import CpuEngine, CpuModel, CpuRunner
from lightserve.model_worker.cpu.sampler import Sampler
from lightserve.model_worker.engine import Engine
from lightserve.model_worker.host import free_host_bytes, num_usable_cpus
from lightserve.model_worker.kv_cache import GIB, KVCache, PoolSize, size_pool, slot_bytes
from lightserve.model_worker.loading import LoadedEngine, sampled_vocab_size
from lightserve.model_worker.models.llama import LlamaModel
from lightserve.model_worker.req_rows import ReqRows
from lightserve.model_worker.tensor_parallel import Ranks, join_ranks
from lightserve.model_worker.weights.loader import load_weights
from lightserve.model_worker.weights.sharding import Shard

# The pool shares the memory with all else on the machine: by default it takes half of what is free, and no more than
# 4 GiB. Asked for by hand, it may take nearly all; the rest is for what attention copies from it.
_DEFAULT_FRAC = 0.5
_DEFAULT_MAX_BYTES = 4 * GIB
_MAX_FRAC = 0.9

_CPU = torch.device("cpu")


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


def load_cpu_engine(boot: Boot, rank: int) -> LoadedEngine[CpuRunner]:
    """Load one rank.

    Raises:
        ConfigError: The model, the number of ranks or the number of slots does not fit.
    """
    config = boot.config
    set_num_threads(config.tp)
    dtype = resolve_cpu_dtype(config.dtype, boot.model.dtype)
    vocab_size = sampled_vocab_size(boot)
    ranks = join_ranks(boot.run_dir, rank, config.tp, _CPU)
    model = load_cpu_model(boot.model, ranks, dtype=dtype, load_format=config.load_format)
    pool = _size_pool(boot, slot_bytes(boot.model.num_layers, model.num_kv_heads, boot.model.head_dim, dtype))
    limits = EngineLimits(pool.num_slots, config.running_max_req_size, boot.max_req_total_len, vocab_size)
    return LoadedEngine(make_cpu_engine(boot.model, model, limits, dtype=dtype), pool)


def load_cpu_model(config: ModelConfig, ranks: Ranks, *, dtype: torch.dtype, load_format: str) -> CpuModel:
    """Load this rank's weights and lay them out for the CPU.

    Raises:
        ConfigError: The model's files or the number of ranks do not fit.
    """
    shard = Shard.of(config, ranks.rank, ranks.world_size)
    weights = load_weights(config, shard, device=_CPU, dtype=dtype, load_format=load_format)
    backend = CpuBackend(
        config.rope,
        head_dim=config.head_dim,
        num_heads=len(shard.q_heads),
        num_kv_heads=len(shard.kv_heads),
        eps=config.rms_norm_eps,
        dtype=dtype,
    )
    with torch.inference_mode():
        return LlamaModel(config, weights, shard, backend=backend, ranks=ranks)


def make_cpu_engine(config: ModelConfig, model: CpuModel, limits: EngineLimits, *, dtype: torch.dtype) -> CpuEngine:
    """Give a model its cache, its rows and its sampler."""
    kv_cache = KVCache(
        limits.num_slots,
        num_layers=config.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=_CPU,
    )
    rows = ReqRows(limits.num_rows, limits.max_req_total_len, _CPU)
    sampler = Sampler(limits.num_rows, min(config.vocab_size, limits.vocab_size), config.eos_token_ids)
    return Engine(rows, CpuRunner(model, kv_cache, rows, sampler))


def set_num_threads(num_ranks: int) -> None:
    """Share this process's CPUs among the ranks; ``OMP_NUM_THREADS`` overrules it.

    From four CPUs on, one is left to the other processes: a product is as late as its latest thread. Below, it would
    cost more than they take, which is 2 % of two CPUs at 64 streams.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        num_cpus = num_usable_cpus()
        torch.set_num_threads(max(1, (num_cpus - (num_cpus >= 4)) // num_ranks))


def _size_pool(boot: Boot, bytes_per_slot: int) -> PoolSize:
    num_rows = boot.config.running_max_req_size
    reserved = reserved_bytes(
        boot.model,
        num_rows=num_rows,
        max_req_total_len=boot.max_req_total_len,
        batch_max_tokens=boot.batch_max_tokens,
    )
    free_bytes = max(0, free_host_bytes() // boot.config.tp - reserved)
    return size_pool(
        boot.config.max_total_token_num,
        free_bytes=int(free_bytes * _MAX_FRAC),
        default_bytes=int(min(free_bytes * _DEFAULT_FRAC, _DEFAULT_MAX_BYTES // boot.config.tp)),
        bytes_per_slot=bytes_per_slot,
        max_useful=num_rows * boot.max_req_total_len,
    )
