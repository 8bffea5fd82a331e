"""The seam between the model and the machine: every operation the model uses, implemented once per kind of device.

The model knows this protocol only; the loading of each kind of engine picks its implementation once, at start. An
implementation is made for one model: it knows its heads, its rotary embedding and the eps of its norms.
"""

from typing import Protocol

import torch

from lightserve.model_worker.layers.linear import Linear, NormLinear


class Backend(Protocol):
    """Operations on one device. Norms, rotations and softmax are computed in float32 and rounded once.

    Each implementation has a ``begin`` of its own: its runner tells it there of the batch that comes next.
    """

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Prepare a projection. It may keep its own layout of ``weight`` only.

        Args:
            weight: [out_features, in_features].
            bias: [out_features] or None.
        """

    def norm_linear(self, gain: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NormLinear:
        """Prepare a residual sum, a norm and a projection of what it gives.

        Args:
            gain: [in_features], of the norm.
            weight: [out_features, in_features].
            bias: [out_features] or None.
        """

    def norm_gated_linear(self, gain: torch.Tensor, weight: torch.Tensor) -> NormLinear:
        """Prepare the same with silu(gate) * up after it.

        Args:
            gain: [in_features], of the norm.
            weight: [2 * out_features, in_features]; gate rows, then up rows.
        """

    def head(self, weight: torch.Tensor) -> Linear:
        """Prepare the projection to logits; they may come in a wider type than the weight's.

        Args:
            weight: [vocab_rows, hidden_size].
        """

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor, *, first_id: int) -> torch.Tensor:
        """Look up rows of a shard of the table.

        Args:
            token_ids: [num_tokens] int32.
            table: [vocab_rows, hidden_size], the rows of ids [first_id, first_id + vocab_rows).
            first_id: Where the shard starts.

        Returns:
            [num_tokens, hidden_size], of the residual stream's type; zeros for ids outside the shard.
        """

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place and normalise the sum.

        Args:
            x: [num_tokens, hidden_size], may be changed.
            residual: [num_tokens, hidden_size], changed.
            gain: [hidden_size].
            out: [num_tokens, hidden_size] contiguous; unless given, the implementation chooses a place.

        Returns:
            [num_tokens, hidden_size], of the weights' type.
        """

    def attention(
        self, qkv: torch.Tensor, kv_layer: torch.Tensor, *, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend causally from every token of the batch to its request's slots, having written its own.

        Queries and keys are normalised, if asked, and rotated first.

        Args:
            qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], may be changed.
            kv_layer: [num_slots + 1, 2, num_kv_heads, head_dim], changed at the batch's slots.
            q_norm: [head_dim], gain of every query head's norm.
            k_norm: [head_dim], the same for keys; both or neither.

        Returns:
            [num_tokens, num_heads * head_dim].
        """
