"""The backend for NVIDIA GPUs: Triton kernels, launched without ever waiting for the device."""

from dataclasses import dataclass

import torch

from lightserve.kernels.decode_attention import decode_attention
from lightserve.kernels.decode_plan import DecodePlan, plan_decode
from lightserve.kernels.embedding import embedding
from lightserve.kernels.normed import Normed
from lightserve.kernels.prefill_attention import PrefillPlan, plan_prefill, prefill_attention
from lightserve.kernels.rms_norm import add_rms_norm, rms_norm
from lightserve.kernels.rope_kv_write import Rotation, rope_kv_write
from lightserve.model_worker.cuda.linear import (
    CudaHead,
    CudaLinear,
    CudaLinearAddNorm,
    CudaNormedGatedLinear,
    CudaNormedLinear,
)
from lightserve.model_worker.cuda.step_inputs import CHUNKS_PER_LAUNCH, ForwardShape, forward_sections
from lightserve.model_worker.layers.linear import Linear, LinearAddNorm, LinearThenAddNorm, NormedLinear
from lightserve.model_worker.layers.rope import cos_sin, inverse_frequencies
from lightserve.model_worker.tensor_parallel import Ranks
from lightserve.rope_config import RopeConfig

_PLAN_TOKENS = 256  # the plan of prefill tiles is compiled for counts of tokens that are a multiple of this


class CudaBackend:
    """Implements ``Backend``.

    Args:
        rope: The rotary embedding.
        num_heads: This rank's query heads.
        num_kv_heads: This rank's key/value heads.
        head_dim: Of queries, K and V.
        eps: Of every norm.
        max_position: Positions are below.
        max_rows: No batch is given room for more tokens, nor for more decode rows.
        dtype: Of activations.
        device: The GPU.
    """

    def __init__(
        self,
        rope: RopeConfig,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        max_position: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._eps = eps
        self._scale = head_dim**-0.5
        # Rows that pad a batch keep what an earlier one left there.
        self._attended = torch.zeros(max_rows, num_heads, head_dim, dtype=dtype, device=device)
        positions = torch.arange(max_position)
        self._cos_sin = cos_sin(positions, inverse_frequencies(rope, head_dim), rope.attention_factor).to(device)

    def begin(self, words: torch.Tensor, shape: ForwardShape, req_to_slots: torch.Tensor) -> None:
        """Derive what all layers of this batch share.

        Args:
            words: The batch, as ``forward_sections`` lays it out.
            shape: Its shape.
            req_to_slots: The Token Table, with this step's slots in it.
        """
        sections = forward_sections(shape)
        self._req_to_slots = req_to_slots
        self._positions = words[sections.positions]
        self._out_slots = words[sections.out_slots]
        self._decode = self._plan_decode(words, shape) if shape.num_decode else None
        num_launches = shape.num_chunks // CHUNKS_PER_LAUNCH
        self._prefills = [self._plan_prefill(words, shape, launch) for launch in range(num_launches)]

    def _plan_decode(self, words: torch.Tensor, shape: ForwardShape) -> "_Decode":
        sections = forward_sections(shape)
        req_rows, seq_lens = words[sections.decode_rows], words[sections.decode_lens]
        plan = plan_decode(
            req_rows,
            seq_lens,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim,
        )
        return _Decode(req_rows, seq_lens, plan)

    def _plan_prefill(self, words: torch.Tensor, shape: ForwardShape, launch: int) -> "_Prefill":
        sections, start = forward_sections(shape), launch * CHUNKS_PER_LAUNCH
        req_rows = words[sections.chunk_rows][start : start + CHUNKS_PER_LAUNCH]
        seq_lens = words[sections.chunk_lens][start : start + CHUNKS_PER_LAUNCH]
        bounds = words[sections.chunk_bounds][start : start + CHUNKS_PER_LAUNCH + 1]
        plan = plan_prefill(
            self._req_to_slots,
            req_rows,
            bounds,
            seq_lens,
            num_tokens=-(-shape.num_tokens // _PLAN_TOKENS) * _PLAN_TOKENS,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            gather_len=shape.gather_lens[launch] if shape.gather_lens else 0,
        )
        return _Prefill(req_rows, bounds, seq_lens, plan)

    def normed_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NormedLinear:
        """Prepare a projection of normalised rows."""
        return CudaNormedLinear(weight, bias)

    def normed_gated_linear(self, weight: torch.Tensor) -> NormedLinear:
        """Prepare the same for a weight of gate and up, and silu(gate) * up after it."""
        return CudaNormedGatedLinear(weight)

    def linear_add_norm(self, weight: torch.Tensor, gain: torch.Tensor, ranks: Ranks) -> LinearAddNorm:
        """Prepare a projection, its sum with the residual, and the norm of that."""
        apart = LinearThenAddNorm(CudaLinear(weight), self, gain, ranks)
        if ranks.world_size > 1 or weight.dtype is not torch.bfloat16:
            return apart
        return CudaLinearAddNorm(weight, gain, self._eps, apart)

    def head(self, weight: torch.Tensor) -> Linear:
        """Prepare the projection to logits."""
        return CudaHead(weight)

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor, *, first_id: int) -> torch.Tensor:
        """Look up rows of a shard of the table."""
        return embedding(token_ids, table, first_id=first_id)

    def norm(self, x: torch.Tensor, gain: torch.Tensor) -> Normed:
        """Normalise rows."""
        return Normed(rms_norm(x, gain, self._eps))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place and normalise the sum; unless there is ``out``, in the place of ``x``."""
        return add_rms_norm(x, residual, gain, self._eps, out=x if out is None else out)

    def attention(
        self, qkv: torch.Tensor, kv_layer: torch.Tensor, *, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Write K and V to the batch's slots, then attend causally from every token to its request's slots.

        A batch of decode rows leaves the rotation and the writing to decode attention. In any other the decode kernel
        writes one row for each decode row that there is room for, zeros where none is, and the prefill kernel then
        writes those of its tokens.
        """
        rotation = Rotation(self._cos_sin, q_norm, k_norm, self._eps)
        out = self._attended
        if self._decode is not None and not self._prefills:
            self._attend_decode(self._decode, qkv, kv_layer, out, rotation)
        else:
            self._attend_mixed(self._rotate_and_write(qkv, kv_layer, rotation), kv_layer, out)
        return out[: len(qkv)].flatten(1)

    def _rotate_and_write(self, qkv: torch.Tensor, kv_layer: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Give the queries, [num_tokens, num_heads, head_dim]."""
        return rope_kv_write(qkv, rotation, self._positions, self._out_slots, kv_layer, num_heads=self._num_heads)

    def _attend_mixed(self, q: torch.Tensor, kv_layer: torch.Tensor, out: torch.Tensor) -> None:
        if self._decode is not None:
            self._attend_decode(self._decode, q, kv_layer, out, None)
        for prefill in self._prefills:
            prefill_attention(
                q,
                kv_layer,
                self._req_to_slots,
                prefill.req_rows,
                prefill.bounds,
                prefill.seq_lens,
                scale=self._scale,
                plan=prefill.plan,
                out=out,
            )

    def _attend_decode(
        self, decode: "_Decode", q: torch.Tensor, kv_layer: torch.Tensor, out: torch.Tensor, rotation: Rotation | None
    ) -> None:
        decode_attention(
            q,
            kv_layer,
            self._req_to_slots,
            decode.req_rows,
            decode.seq_lens,
            scale=self._scale,
            rotation=rotation,
            plan=decode.plan,
            out=out[: len(decode.req_rows)],
        )


@dataclass(frozen=True, slots=True)
class _Decode:
    """What one launch of decode attention reads."""

    req_rows: torch.Tensor
    seq_lens: torch.Tensor
    plan: DecodePlan


@dataclass(frozen=True, slots=True)
class _Prefill:
    """What one launch of prefill attention reads."""

    req_rows: torch.Tensor
    bounds: torch.Tensor
    seq_lens: torch.Tensor
    plan: PrefillPlan
