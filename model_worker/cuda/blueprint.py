"""How the parts of a GPU engine are put together, for any number of slots."""

from dataclasses import dataclass

import numpy as np
import torch

from lightserve.kernels.prefill_attention import MAX_GATHER_LEN
from lightserve.model_config import ModelConfig
from lightserve.model_worker.cuda.backend import CudaBackend
from lightserve.model_worker.cuda.graph import Capturer
from lightserve.model_worker.cuda.graph_shapes import GraphShapes
from lightserve.model_worker.cuda.runner import CudaRunner
from lightserve.model_worker.cuda.step import CudaStep
from lightserve.model_worker.cuda.step_inputs import StepInputs
from lightserve.model_worker.engine import Engine
from lightserve.model_worker.host_batch import HostBatch
from lightserve.model_worker.kv_cache import KVCache
from lightserve.model_worker.models.llama import LlamaModel
from lightserve.model_worker.req_rows import ReqRows
from lightserve.model_worker.sampling_rows import SamplingRows
from lightserve.model_worker.tensor_parallel import Ranks
from lightserve.model_worker.weights.loader import load_weights
from lightserve.model_worker.weights.sharding import Shard


@dataclass(frozen=True, slots=True)
class CudaBlueprint:
    """Everything about a GPU engine but its number of slots.

    Attributes:
        config: The model's facts.
        model: This rank's.
        num_rows: Most running requests.
        max_tokens: Most tokens of one step.
        max_req_total_len: Most tokens of one request.
        vocab_size: Ids from here on are never sampled.
        dtype: Of activations and cache.
        device: The GPU; in tests a CPU that interprets the kernels.
    """

    config: ModelConfig
    model: LlamaModel[CudaBackend]
    num_rows: int
    max_tokens: int
    max_req_total_len: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def shapes(self) -> GraphShapes:
        """What there is to capture."""
        return GraphShapes(self.num_rows, self.max_tokens)

    def build(self, num_slots: int, capturer: Capturer | None) -> Engine[CudaRunner]:
        """Make an engine; without a capturer it launches every step kernel by kernel."""
        step, inputs, rows = self.build_step(num_slots)
        params = SamplingRows(self.num_rows, self.config.eos_token_ids)
        return Engine(rows, CudaRunner(step, inputs, rows, params, self.shapes, capturer))

    def build_step(self, num_slots: int) -> tuple[CudaStep, StepInputs, ReqRows]:
        """Make what launches a step's work, what it reads, and the state of the requests."""
        config, shapes = self.config, self.shapes
        kv_cache = KVCache(
            num_slots,
            num_layers=config.num_layers,
            num_kv_heads=self.model.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        rows = ReqRows(self.num_rows, self.max_req_total_len, self.device)
        inputs = StepInputs(
            self.num_rows,
            largest_forward=shapes.largest_forward,
            max_sampled=shapes.max_padded_rows,
            num_eos_ids=len(config.eos_token_ids),
            padding_slot=kv_cache.padding_slot,
            device=self.device,
        )
        step = CudaStep(
            self.model,
            kv_cache,
            rows,
            inputs,
            max_padded_tokens=shapes.max_padded_tokens,
            vocab_size=self.vocab_size,
            dtype=self.dtype,
        )
        return step, inputs, rows

    def largest_batch(self, num_slots: int) -> HostBatch:
        """Make the batch that takes the most memory: every row decodes, and chunks fill up the rest.

        The chunks see as many keys as are ever copied for attention. For an engine of ``num_slots`` slots whose Token
        Table is all zeros.
        """
        num_decode = min(self.num_rows, self.max_tokens)
        num_chunks = min(-(-MAX_GATHER_LEN // self.max_req_total_len), self.num_rows, self.max_tokens - num_decode)
        chunk_lens = _split(min(self.max_tokens - num_decode, num_chunks * self.max_req_total_len), num_chunks)
        seq_lens = [min(self.max_req_total_len, max(MAX_GATHER_LEN // num_chunks, n)) for n in chunk_lens]
        extend_lens = np.array([1] * num_decode + chunk_lens, dtype=np.int32)
        num_tokens = int(extend_lens.sum())
        return HostBatch(
            num_decode=num_decode,
            req_rows=np.array([*range(num_decode), *range(num_chunks)], dtype=np.int32),
            starts=np.array([1] * num_decode + seq_lens, dtype=np.int32) - extend_lens,
            extend_lens=extend_lens,
            is_sampled=np.arange(num_decode + num_chunks) < num_decode,
            token_ids=np.zeros(num_tokens, dtype=np.int32),
            out_slots=np.arange(num_tokens, dtype=np.int32) % num_slots,
        )


def load_blueprint(
    config: ModelConfig,
    ranks: Ranks,
    *,
    num_rows: int,
    max_tokens: int,
    max_req_total_len: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
) -> CudaBlueprint:
    """Load this rank's weights; ``dtype`` is theirs too, all else as ``CudaBlueprint`` has it.

    Raises:
        ConfigError: The model's files or the number of ranks do not fit.
    """
    largest = GraphShapes(num_rows, max_tokens).largest_forward
    model = _load_model(
        config,
        ranks,
        max_position=max_req_total_len,
        max_rows=max(largest.num_tokens, largest.num_decode),
        dtype=dtype,
        device=device,
        load_format=load_format,
    )
    return CudaBlueprint(
        config=config,
        model=model,
        num_rows=num_rows,
        max_tokens=max_tokens,
        max_req_total_len=max_req_total_len,
        vocab_size=vocab_size,
        dtype=dtype,
        device=device,
    )


def _load_model(
    config: ModelConfig,
    ranks: Ranks,
    *,
    max_position: int,
    max_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
) -> LlamaModel[CudaBackend]:
    shard = Shard.of(config, ranks.rank, ranks.world_size)
    weights = load_weights(config, shard, device=device, dtype=dtype, load_format=load_format)
    backend = CudaBackend(
        config.rope,
        num_heads=len(shard.q_heads),
        num_kv_heads=len(shard.kv_heads),
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        max_position=max_position,
        max_rows=max_rows,
        dtype=dtype,
        device=device,
    )
    return LlamaModel(config, weights, shard, backend=backend, ranks=ranks)


def _split(total: int, num_parts: int) -> list[int]:
    """Split a number into parts of nearly equal size."""
    return [total * (i + 1) // num_parts - total * i // num_parts for i in range(num_parts)]
