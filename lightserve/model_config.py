"""What every process must know of a model: its shape, its limits, the ids that end a text."""

from typing import Literal, TypeAlias

import msgspec

from lightserve.rope_config import RopeConfig

Architecture: TypeAlias = Literal["llama", "mistral", "qwen2", "qwen3"]
DtypeName: TypeAlias = Literal["bfloat16", "float16", "float32"]


class ModelConfig(msgspec.Struct, frozen=True):
    """One model's facts, from its folder or .gguf file, checked.

    Attributes:
        architecture: The family whose formulas it follows.
        weights_path: The folder or the .gguf file.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the feed-forward layer.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; divides ``num_heads``.
        head_dim: Even; not always ``hidden_size / num_heads``.
        vocab_size: Rows of the embedding table; may exceed the ids that have text.
        rms_norm_eps: Of every norm.
        rope: The rotary embedding.
        max_position: Longest sequence, after RoPE scaling.
        tie_embeddings: The output head is the embedding table.
        qkv_bias: The qkv projections add a bias.
        qk_norm: Queries and keys are normalised per head before RoPE.
        dtype: The checkpoint's number format; bfloat16 for quantised files.
        eos_token_ids: Every id that ends a text, ascending; may be empty.
        bos_token_id: The id that begins a text, if the model has one.
    """

    architecture: Architecture
    weights_path: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: DtypeName
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
