"""One rank's weights, as the model reads them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer's share. ``q``, ``kv`` and ``ffn`` are this rank's heads and width (``Shard``).

    Attributes:
        input_norm: [hidden_size].
        qkv: [(q + 2 kv) * head_dim, hidden_size]; rows of all q heads, then k, then v.
        qkv_bias: [(q + 2 kv) * head_dim] or None.
        q_norm: [head_dim] or None.
        k_norm: [head_dim] or None.
        o_proj: [hidden_size, q * head_dim]; the ranks' products are summed.
        post_attention_norm: [hidden_size].
        gate_up: [ffn, 2, hidden_size]; of each feature the gate's row, then up's.
        down_proj: [hidden_size, ffn]; the ranks' products are summed.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o_proj: torch.Tensor
    post_attention_norm: torch.Tensor
    gate_up: torch.Tensor
    down_proj: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """One rank's weights, all of one dtype, contiguous, on its device.

    Attributes:
        embedding: [vocab_rows, hidden_size], rows ``[rank * vocab_rows, (rank + 1) * vocab_rows)`` of the table; rows
            at or beyond ``vocab_size`` are zero.
        layers: One per decoder layer.
        final_norm: [hidden_size].
        lm_head: [vocab_rows, hidden_size], rows as ``embedding``; the same tensor when the head is tied.
    """

    embedding: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    lm_head: torch.Tensor
