"""The backend for CPUs: torch operations chosen for few calls and few passes over memory."""

import torch
import torch.nn.functional as F

from lightserve.kernels.embedding import embedding_reference
from lightserve.kernels.normed import Normed
from lightserve.model_worker.cpu.attention import AttentionPlan, attend, plan_attention
from lightserve.model_worker.cpu.decode_attention import AttentionShape
from lightserve.model_worker.cpu.forward_batch import ForwardBatch
from lightserve.model_worker.cpu.linear import LinearOfNormed, LinearThenSilu, PackedLinear, PlainLinear, can_pack
from lightserve.model_worker.layers.linear import Linear, LinearAddNorm, LinearThenAddNorm, NormedLinear
from lightserve.model_worker.layers.rope import cos_sin, inverse_frequencies
from lightserve.model_worker.tensor_parallel import Ranks
from lightserve.rope_config import RopeConfig


class CpuBackend:
    """Implements ``Backend``.

    The residual stream is float32: with bfloat16 weights that brings SmolLM2-135M's logits three times closer to its
    float32 ones (0.05 instead of 0.13 on average) for one more pass over a few hundred numbers a token.

    Args:
        rope: The rotary embedding.
        head_dim: Of queries, K and V.
        num_heads: This rank's.
        num_kv_heads: This rank's.
        eps: Of every norm.
        dtype: Of weights, activations and cache.
    """

    def __init__(
        self, rope: RopeConfig, *, head_dim: int, num_heads: int, num_kv_heads: int, eps: float, dtype: torch.dtype
    ) -> None:
        self._inv_freq = inverse_frequencies(rope, head_dim)
        self._attention_factor = rope.attention_factor
        self._head_dim = head_dim
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._eps = eps
        self._dtype = dtype
        self._packs = can_pack(dtype)

    def normed_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NormedLinear:
        """Prepare a projection of normalised rows."""
        return LinearOfNormed(self._linear(weight, bias))

    def normed_gated_linear(self, weight: torch.Tensor) -> NormedLinear:
        """Prepare the same for a weight of gate and up, and silu(gate) * up after it."""
        # gate's features before up's: torch's SiLU takes twice as long over every other number
        halves = weight.flatten(0, 1)
        # in place: where a copy has been between two packed weights, memory stays that nobody uses
        halves.copy_(weight.transpose(0, 1).flatten(0, 1))
        return LinearOfNormed(LinearThenSilu(self._linear(halves)))

    def linear_add_norm(self, weight: torch.Tensor, gain: torch.Tensor, ranks: Ranks) -> LinearAddNorm:
        """Prepare a projection, its sum with the residual, and the norm of that."""
        return LinearThenAddNorm(self._linear(weight), self, gain, ranks)

    def head(self, weight: torch.Tensor) -> Linear:
        """Prepare the projection to logits."""
        return self._linear(weight)

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return PackedLinear(weight, bias) if self._packs else PlainLinear(weight, bias)

    def begin(self, batch: ForwardBatch, padding_slot: int) -> None:
        """Derive what all layers of this batch share."""
        angles = cos_sin(batch.positions, self._inv_freq, self._attention_factor).unsqueeze(1)
        cos, sin = angles.chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2] each
        # rope(x) = x * (cos, cos) + halves_swapped(x) * (-sin, sin): two products instead of four and a join.
        self._cos = torch.cat((cos, cos), dim=-1)
        self._sin = torch.cat((-sin, sin), dim=-1)
        self._out_slots = batch.out_slots.long()
        shape = AttentionShape(self._num_heads, self._num_kv_heads, self._head_dim, padding_slot, self._dtype)
        self._plan: AttentionPlan = plan_attention(batch, shape)

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor, *, first_id: int) -> torch.Tensor:
        """Look up rows of a shard of the table."""
        return embedding_reference(token_ids, table, first_id=first_id).float()

    def norm(self, x: torch.Tensor, gain: torch.Tensor) -> Normed:
        """Normalise rows."""
        return Normed(self._rms_norm(x, gain))

    def _rms_norm(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), gain.shape, gain.float(), self._eps).to(self._dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place and normalise the sum."""
        normed = F.rms_norm(residual.add_(x), gain.shape, gain.float(), self._eps).to(self._dtype)
        return normed if out is None else out.copy_(normed)

    def attention(
        self, qkv: torch.Tensor, kv_layer: torch.Tensor, *, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Write K and V to the batch's slots, then attend causally from every token to its request's slots."""
        q = self._rotate_and_write(qkv, kv_layer, q_norm, k_norm)
        return attend(q, kv_layer, self._plan).flatten(1)

    def _rotate_and_write(
        self, qkv: torch.Tensor, kv_layer: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        num_heads, num_kv_heads, head_dim = self._num_heads, self._num_kv_heads, self._head_dim
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        qk = heads[:, : num_heads + num_kv_heads]
        if q_norm is not None and k_norm is not None:
            q, k = torch.split(qk, [num_heads, num_kv_heads], dim=1)
            qk = torch.cat((self._rms_norm(q, q_norm), self._rms_norm(k, k_norm)), dim=1)
        rotated = self._rotate(qk)
        heads[:, num_heads : num_heads + num_kv_heads] = rotated[:, num_heads:]
        kv_layer.index_copy_(0, self._out_slots, heads[:, num_heads:].reshape(-1, 2, num_kv_heads, head_dim))
        return rotated[:, :num_heads]

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        swapped = wide.roll(x.shape[-1] // 2, dims=-1)
        return wide.mul_(self._cos).addcmul_(swapped, self._sin).to(x.dtype)
