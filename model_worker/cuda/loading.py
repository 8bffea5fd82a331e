"""A GPU engine: ranks met, weights loaded, the largest step tried, the pool sized by what is left, graphs captured."""

import logging
import time

import torch

from lightserve.boot import Boot
from lightserve.kernels.compile_ahead import compiling_ahead
from lightserve.model_worker.cuda.blueprint import CudaBlueprint, load_blueprint
from lightserve.model_worker.cuda.graph import CudaCapturer, Graph
from lightserve.model_worker.cuda.memory import MemoryLedger
from lightserve.model_worker.cuda.runner import CudaRunner
from lightserve.model_worker.engine import Engine
from lightserve.model_worker.host import num_usable_cpus
from lightserve.model_worker.kv_cache import PoolSize, size_pool, slot_bytes
from lightserve.model_worker.loading import LoadedEngine, resolve_dtype, sampled_vocab_size
from lightserve.model_worker.tensor_parallel import join_ranks

logger = logging.getLogger(__name__)

_TRIAL_SLOTS = 1024
# Kept free beyond what was measured: the allocator rounds up, and the driver takes memory when a kernel first runs.
_RESERVE_FRAC = 0.01


@torch.inference_mode()
def load_cuda_engine(boot: Boot, rank: int) -> LoadedEngine[CudaRunner]:
    """Load one rank, on the GPU of the same number.

    All its work goes to one stream of this thread's: call the engine from this thread only.

    Raises:
        ConfigError: The model, the number of ranks or the number of slots does not fit.
    """
    start = time.monotonic()
    device = torch.device("cuda", rank)
    capturer = CudaCapturer(_open(device))
    ledger = MemoryLedger(device)
    blueprint = _load_blueprint(boot, rank, device)
    ledger.enter("weights")
    logger.info("weights are loaded after %.1f s", time.monotonic() - start)
    trial = _try_largest_step(blueprint)
    ledger.enter("for the largest step")
    logger.info("the largest step has run after %.1f s", time.monotonic() - start)
    graphs = _capture_largest(blueprint, trial, capturer, ledger)
    pool = _size_pool(boot, blueprint, ledger)
    engine = blueprint.build(pool.num_slots, capturer)
    torch.cuda.synchronize(device)
    graphs.clear()  # they held the memory that the engine's graphs now share
    logger.info("%d graphs are captured after %.1f s", blueprint.shapes.count, time.monotonic() - start)
    return LoadedEngine(engine, pool)


def _open(device: torch.device) -> torch.cuda.Stream:
    """Make the GPU and a stream of its own this thread's."""
    # Segments that grow do not fragment: what the largest step needed is then enough for any other.
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
    torch.cuda.set_stream(stream)
    return stream


def _load_blueprint(boot: Boot, rank: int, device: torch.device) -> CudaBlueprint:
    config = boot.config
    return load_blueprint(
        boot.model,
        join_ranks(boot.run_dir, rank, config.tp, device),
        num_rows=config.running_max_req_size,
        max_tokens=boot.batch_max_tokens,
        max_req_total_len=boot.max_req_total_len,
        vocab_size=sampled_vocab_size(boot),
        dtype=resolve_dtype(config.dtype, boot.model.dtype),
        device=device,
        load_format=config.load_format,
    )


def _try_largest_step(blueprint: CudaBlueprint) -> Engine[CudaRunner]:
    """Compile every kernel, and run what takes the most memory, on a small cache."""
    trial = blueprint.build(_TRIAL_SLOTS, capturer=None)
    with compiling_ahead(num_usable_cpus()):
        for shape in blueprint.shapes.to_compile:
            trial.runner.launch_empty(shape)
    trial.runner.run(0, blueprint.largest_batch(_TRIAL_SLOTS)).result()
    for shape in (blueprint.shapes.largest_apart, *blueprint.shapes.largest):
        trial.runner.launch_empty(shape)
    return trial


def _capture_largest(
    blueprint: CudaBlueprint, trial: Engine[CudaRunner], capturer: CudaCapturer, ledger: MemoryLedger
) -> list[Graph]:
    """Capture the graphs that take the most memory, which the others will share; set aside what the others add."""
    reserved = torch.cuda.memory_reserved(blueprint.device)
    graphs = [trial.runner.capture(shape, capturer) for shape in blueprint.shapes.largest]
    taken = ledger.enter("for graphs")
    shared = torch.cuda.memory_reserved(blueprint.device) - reserved
    ledger.set_aside("for more graphs", max(0, taken - shared) // len(graphs) * blueprint.shapes.count)
    return graphs


def _size_pool(boot: Boot, blueprint: CudaBlueprint, ledger: MemoryLedger) -> PoolSize:
    ledger.set_aside("in reserve", int(ledger.total_bytes * _RESERVE_FRAC))
    model = boot.model
    pool = size_pool(
        boot.config.max_total_token_num,
        free_bytes=ledger.free_bytes,
        default_bytes=ledger.free_bytes,
        bytes_per_slot=slot_bytes(model.num_layers, blueprint.model.num_kv_heads, model.head_dim, blueprint.dtype),
        max_useful=boot.config.running_max_req_size * boot.max_req_total_len,
    )
    return PoolSize(pool.num_slots, f"{pool.note}; {ledger.describe()}")
