"""The seam between the model and the machine: every operation the model uses, implemented once per kind of device.

The model knows this protocol only; the loading of each kind of engine picks its implementation once, at start.
"""

from typing import Protocol

import torch

from lightserve.model_worker.layers.linear import Linear, NormLinear


class Backend(Protocol):
    """Operations on one device. Norms, rotations and softmax are computed in float32 and rounded once.

    Each implementation has a ``begin`` of its own: its runner tells it there of the batch that comes next.
    """

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Prepare a projection. It may keep its own layout of ``weight`` only."""

    def norm_linear(
        self, gain: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> NormLinear:
        """Prepare a residual sum, a norm and a projection of what it gives."""

    def silu_linear(self, weight: torch.Tensor) -> Linear:
        """Prepare silu(gate) * up and a projection of it; it maps [n, 2 * in_features], gate then up."""

    def head(self, weight: torch.Tensor) -> Linear:
        """Prepare the projection to logits; they may come in a wider type than the weight's."""

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor, *, first_id: int) -> torch.Tensor:
        """Look up rows of a shard of the table that starts at ``first_id``; zeros for ids outside it."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place and normalise the sum."""

    def rope_kv_write(
        self,
        qkv: torch.Tensor,
        kv_layer: torch.Tensor,
        *,
        num_heads: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Normalise (if asked) and rotate queries and keys, write K and V to the batch's slots.

        Returns:
            [num_tokens, num_heads, head_dim], the rotated queries.
        """

    def attention(self, q: torch.Tensor, kv_layer: torch.Tensor) -> torch.Tensor:
        """Attend causally from every token of the batch to its request's slots.

        Args:
            q: [num_tokens, num_heads, head_dim].
            kv_layer: [num_slots + 1, 2, num_kv_heads, head_dim], with this step's K and V in it.

        Returns:
            [num_tokens, num_heads, head_dim].
        """


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, or Arm's BF16)."""
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") == "x86_64":
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return bool(capabilities.get("bf16"))
