"""The seam between the model and the machine: every operation the model uses, implemented once per kind of device.

The model knows this protocol only; the loading of each kind of engine picks its implementation once, at start. An
implementation is made for one model: it knows its heads, its rotary embedding and the eps of its norms.
"""

from typing import Protocol

import torch

from lightserve.kernels.normed import Normed
from lightserve.model_worker.layers.linear import Linear, LinearAddNorm, NormedLinear
from lightserve.model_worker.tensor_parallel import Ranks


class Backend(Protocol):
    """Operations on one device. Norms, rotations and softmax are computed in float32 and rounded once.

    Each implementation has a ``begin`` of its own: its runner tells it there of the batch that comes next.
    """

    def normed_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NormedLinear:
        """Prepare a projection of normalised rows.

        This and the three other methods that prepare a weight may keep only their own layout of it, and change it.

        Args:
            weight: [out_features, in_features].
            bias: [out_features] or None.
        """

    def normed_gated_linear(self, weight: torch.Tensor) -> NormedLinear:
        """Prepare the same with silu(gate) * up after it.

        Args:
            weight: [out_features, 2, in_features]; of each feature the gate's row, then up's.
        """

    def linear_add_norm(self, weight: torch.Tensor, gain: torch.Tensor, ranks: Ranks) -> LinearAddNorm:
        """Prepare a projection that is summed over ranks and added to the residual, and the norm of that sum.

        Args:
            weight: [size, in_features], this rank's.
            gain: [size], of the norm.
            ranks: Each projects its part.
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

    def norm(self, x: torch.Tensor, gain: torch.Tensor) -> Normed:
        """Normalise ``x`` [num_tokens, hidden_size] by rows, with ``gain`` [hidden_size]."""

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
            [num_tokens, num_heads * head_dim]; holds until the next call.
        """
