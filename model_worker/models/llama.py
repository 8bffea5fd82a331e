"""The Llama family: one decoder for Llama, Mistral, Qwen2 and Qwen3; what differs are facts of ``ModelConfig``."""

from typing import Generic, TypeVar

import torch

from lightserve.kernels.normed import Normed
from lightserve.model_config import ModelConfig
from lightserve.model_worker.kv_cache import KVCache
from lightserve.model_worker.layers.backend import Backend
from lightserve.model_worker.tensor_parallel import Ranks
from lightserve.model_worker.weights.model_weights import LayerWeights, ModelWeights
from lightserve.model_worker.weights.sharding import Shard

BackendT = TypeVar("BackendT", bound=Backend)


class DecoderLayer:
    """Attention and feed-forward of one layer, this rank's share."""

    def __init__(self, weights: LayerWeights, next_gain: torch.Tensor, backend: Backend, ranks: Ranks) -> None:
        self.qkv = backend.normed_linear(weights.qkv, weights.qkv_bias)
        self.q_norm = weights.q_norm
        self.k_norm = weights.k_norm
        self.o_proj = backend.linear_add_norm(weights.o_proj, weights.post_attention_norm, ranks)
        self.gate_up = backend.normed_gated_linear(weights.gate_up)
        self.down_proj = backend.linear_add_norm(weights.down_proj, next_gain, ranks)


class LlamaModel(Generic[BackendT]):
    """One rank's model.

    Args:
        config: The model's facts.
        weights: This rank's; layers leave the list as they are prepared, so that at most one is held more than once.
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
        self._first_gain, *next_gains = (layer.input_norm for layer in weights.layers)
        self._layers = [
            DecoderLayer(weights.layers.pop(0), next_gain, backend, ranks)
            for next_gain in [*next_gains, weights.final_norm]
        ]
        self._lm_head = backend.head(weights.lm_head)

    def forward(self, token_ids: torch.Tensor, kv_cache: KVCache, *, out: torch.Tensor) -> torch.Tensor:
        """Run the batch that the backend has begun, writing its K and V.

        Args:
            token_ids: [num_tokens] int32, none negative.
            kv_cache: This rank's.
            out: [num_tokens, hidden_size] contiguous, of the weights' type.

        Returns:
            ``out``: last hidden states.
        """
        embedded = self.backend.embedding(token_ids, self._embedding, first_id=self._first_id)
        residual = self._ranks.all_reduce(embedded)
        normed = self.backend.norm(residual, self._first_gain)
        for layer, kv_layer in zip(self._layers, kv_cache.layers, strict=True):
            activated = self._attend_and_gate(layer, kv_layer, normed, residual)
            normed = layer.down_proj(activated, residual, out=out if layer is self._layers[-1] else None)
        return normed.rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states to logits.

        Args:
            hidden: [n, hidden_size], n at least 1.

        Returns:
            [n, world_size * vocab_rows], any float type; columns at or beyond ``vocab_size`` mean nothing.
        """
        return self._ranks.all_gather_columns(self._lm_head(hidden))

    def _attend_and_gate(
        self, layer: DecoderLayer, kv_layer: torch.Tensor, normed: Normed, residual: torch.Tensor
    ) -> torch.Tensor:
        """Run a layer up to its last projection, adding attention's part to the residual."""
        qkv = layer.qkv(normed)
        attended = self.backend.attention(qkv, kv_layer, q_norm=layer.q_norm, k_norm=layer.k_norm)
        return layer.gate_up(layer.o_proj(attended, residual))
