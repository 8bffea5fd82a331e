"""Which block of which stored tensor fills which part of a rank's weights."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from lightserve.model_config import ModelConfig
from lightserve.model_worker.weights.model_weights import LayerWeights, ModelWeights
from lightserve.model_worker.weights.sharding import Shard


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a stored tensor, and the memory it fills.

    Attributes:
        name: The tensor, as Hugging Face names it.
        shape: What the whole stored tensor must measure.
        rows: Of the stored tensor.
        columns: Of the stored tensor; None for a vector.
        target: [len(rows), len(columns)] or [len(rows)], part of a rank's weights; its rows contiguous.
    """

    name: str
    shape: tuple[int, ...]
    rows: range
    columns: range | None
    target: torch.Tensor

    def split(self, max_elements: int, multiple: int) -> Iterator["Piece"]:
        """Cut along the rows, to pieces of at most ``max_elements`` but at least ``multiple`` rows."""
        width = 1 if self.columns is None else len(self.columns)
        step = max(multiple, max_elements // width // multiple * multiple)
        for start in range(0, len(self.rows), step):
            yield replace(self, rows=self.rows[start : start + step], target=self.target[start : start + step])


def allocate(config: ModelConfig, shard: Shard, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Make a rank's weights, not yet filled, except that vocabulary rows nobody stored are zero."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    hidden = config.hidden_size
    q_rows, kv_rows = len(shard.q_heads) * config.head_dim, len(shard.kv_heads) * config.head_dim
    layers = [
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(q_rows + 2 * kv_rows, hidden),
            qkv_bias=empty(q_rows + 2 * kv_rows) if config.qkv_bias else None,
            q_norm=empty(config.head_dim) if config.qk_norm else None,
            k_norm=empty(config.head_dim) if config.qk_norm else None,
            o_proj=empty(hidden, q_rows),
            post_attention_norm=empty(hidden),
            gate_up=empty(len(shard.ffn), 2, hidden),
            down_proj=empty(hidden, len(shard.ffn)),
        )
        for _ in range(config.num_layers)
    ]
    embedding = empty(len(shard.vocab), hidden)
    lm_head = embedding if config.tie_embeddings else empty(len(shard.vocab), hidden)
    num_stored = len(_stored_rows(config, shard))
    for table in (embedding, lm_head):
        table[num_stored:].zero_()
    return ModelWeights(embedding=embedding, layers=layers, final_norm=empty(hidden), lm_head=lm_head)


def pieces_of(weights: ModelWeights, config: ModelConfig, shard: Shard) -> Iterator[Piece]:
    """List what must be read to fill a rank's weights. Every stored tensor that the model has is named."""
    table_shape = (config.vocab_size, config.hidden_size)
    stored = _stored_rows(config, shard)
    all_columns = range(config.hidden_size)
    yield Piece("model.embed_tokens.weight", table_shape, stored, all_columns, weights.embedding[: len(stored)])
    for index, layer in enumerate(weights.layers):
        yield from _pieces_of_layer(f"model.layers.{index}", layer, config, shard)
    yield _vector("model.norm.weight", weights.final_norm)
    if not config.tie_embeddings:
        yield Piece("lm_head.weight", table_shape, stored, all_columns, weights.lm_head[: len(stored)])


def _pieces_of_layer(prefix: str, layer: LayerWeights, config: ModelConfig, shard: Shard) -> Iterator[Piece]:
    hidden, all_rows = config.hidden_size, range(config.hidden_size)
    yield _vector(f"{prefix}.input_layernorm.weight", layer.input_norm)
    yield from _qkv_pieces(f"{prefix}.self_attn", layer, config, shard)
    if layer.q_norm is not None and layer.k_norm is not None:
        yield _vector(f"{prefix}.self_attn.q_norm.weight", layer.q_norm)
        yield _vector(f"{prefix}.self_attn.k_norm.weight", layer.k_norm)
    q_columns = _rows_of_heads(shard.q_heads, config.head_dim)
    o_shape = (hidden, config.num_heads * config.head_dim)
    yield Piece(f"{prefix}.self_attn.o_proj.weight", o_shape, all_rows, q_columns, layer.o_proj)
    yield _vector(f"{prefix}.post_attention_layernorm.weight", layer.post_attention_norm)
    up_shape = (config.intermediate_size, hidden)
    yield Piece(f"{prefix}.mlp.gate_proj.weight", up_shape, shard.ffn, all_rows, layer.gate_up[:, 0])
    yield Piece(f"{prefix}.mlp.up_proj.weight", up_shape, shard.ffn, all_rows, layer.gate_up[:, 1])
    yield Piece(f"{prefix}.mlp.down_proj.weight", up_shape[::-1], all_rows, shard.ffn, layer.down_proj)


def _qkv_pieces(prefix: str, layer: LayerWeights, config: ModelConfig, shard: Shard) -> Iterator[Piece]:
    start = 0
    for letter, heads, num_heads in (
        ("q", shard.q_heads, config.num_heads),
        ("k", shard.kv_heads, config.num_kv_heads),
        ("v", shard.kv_heads, config.num_kv_heads),
    ):
        name = f"{prefix}.{letter}_proj"
        rows = _rows_of_heads(heads, config.head_dim)
        part = slice(start, start + len(rows))
        shape = (num_heads * config.head_dim, config.hidden_size)
        yield Piece(f"{name}.weight", shape, rows, range(config.hidden_size), layer.qkv[part])
        if layer.qkv_bias is not None:
            yield Piece(f"{name}.bias", shape[:1], rows, None, layer.qkv_bias[part])
        start = part.stop


def _rows_of_heads(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _vector(name: str, target: torch.Tensor) -> Piece:
    return Piece(name, tuple(target.shape), range(len(target)), None, target)


def _stored_rows(config: ModelConfig, shard: Shard) -> range:
    return range(min(shard.vocab.start, config.vocab_size), min(shard.vocab.stop, config.vocab_size))
