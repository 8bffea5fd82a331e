"""The Llama family: one decoder for Llama, Mistral, Qwen2 and Qwen3; what differs are facts of ``ModelConfig``."""

from typing import Generic, TypeVar

import torch

from lightserve.model_config import ModelConfig
from lightserve.model_worker.kv_cache import KVCache
from lightserve.model_worker.layers.backend import Backend
from lightserve.model_worker.tensor_parallel import Ranks
from lightserve.model_worker.weights.model_weights import LayerWeights, ModelWeights
from lightserve.model_worker.weights.sharding import Shard

BackendT = TypeVar("BackendT", bound=Backend)


class DecoderLayer:
    """Attention and feed-forward of one layer, this rank's share."""

    def __init__(self, weights: LayerWeights, backend: Backend) -> None:
        self.qkv = backend.norm_linear(weights.input_norm, weights.qkv, weights.qkv_bias)
        self.q_norm = weights.q_norm
        self.k_norm = weights.k_norm
        self.o_proj = backend.linear(weights.o_proj)
        self.gate_up = backend.norm_gated_linear(weights.post_attention_norm, weights.gate_up)
        self.down_proj = backend.linear(weights.down_proj)


class LlamaModel(Generic[BackendT]):
    """One rank's model.

    Args:
        config: The model's facts.
        weights: This rank's; layers leave the list as they are prepared, so that at most one is held twice.
        shard: What this rank holds.
        backend: Does the arithmetic.
        ranks: The other ranks.

    Attributes:
        backend: Does the arithmetic; must have begun the batch.
        hidden_size: Width of the residual stream.
        num_kv_heads: This rank's.
        world_size: Number of ranks.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, shard: Shard, *, backend: BackendT, ranks: Ranks
    ) -> None:
        self.hidden_size = config.hidden_size
        self.num_kv_heads = len(shard.kv_heads)
        self.world_size = ranks.world_size
        self._first_id = shard.vocab.start
        self.backend = backend
        self._ranks = ranks
        self._embedding = weights.embedding
        self._layers = [DecoderLayer(weights.layers.pop(0), backend) for _ in range(config.num_layers)]
        self._final_norm = weights.final_norm
        self._lm_head = backend.head(weights.lm_head)

    def forward(self, token_ids: torch.Tensor, kv_cache: KVCache, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Run the batch that the backend has begun, writing its K and V.

        Args:
            token_ids: [num_tokens] int32, none negative.
            kv_cache: This rank's.
            out: [num_tokens, hidden_size] contiguous; made when not given.

        Returns:
            [num_tokens, hidden_size], last hidden states.
        """
        embedded = self.backend.embedding(token_ids, self._embedding, first_id=self._first_id)
        x, residual = self._run_layer(self._layers[0], kv_cache.layers[0], None, self._ranks.all_reduce(embedded))
        for layer, kv_layer in zip(self._layers[1:], kv_cache.layers[1:], strict=True):
            x, residual = self._run_layer(layer, kv_layer, x, residual)
        return self.backend.add_rms_norm(x, residual, self._final_norm, out=out)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states to logits.

        Args:
            hidden: [n, hidden_size], n at least 1.

        Returns:
            [n, world_size * vocab_rows], any float type; columns at or beyond ``vocab_size`` mean nothing.
        """
        return self._ranks.all_gather_columns(self._lm_head(hidden))

    def _run_layer(
        self, layer: DecoderLayer, kv_layer: torch.Tensor, x: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give what the layer adds to the residual, and the residual it adds it to."""
        qkv, residual = layer.qkv(x, residual)
        attended = self.backend.attention(qkv, kv_layer, q_norm=layer.q_norm, k_norm=layer.k_norm)
        x = self._ranks.all_reduce(layer.o_proj(attended))
        activated, residual = layer.gate_up(x, residual)
        return self._ranks.all_reduce(layer.down_proj(activated)), residual
