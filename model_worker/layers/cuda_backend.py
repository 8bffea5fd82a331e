"""The backend for NVIDIA GPUs: Triton kernels, launched without ever waiting for the device."""

import torch

from lightserve.kernels.decode_attention import DecodePlan, decode_attention, plan_decode
from lightserve.kernels.embedding import embedding
from lightserve.kernels.prefill_attention import PrefillPlan, plan_prefill, prefill_attention
from lightserve.kernels.rms_norm import add_rms_norm, rms_norm
from lightserve.kernels.rope_kv_write import rope_kv_write
from lightserve.kernels.silu_mul import silu_mul
from lightserve.model_worker.layers.cuda_linear import CudaHead, CudaLinear
from lightserve.model_worker.layers.linear import Linear
from lightserve.model_worker.layers.rope import cos_sin, inverse_frequencies
from lightserve.model_worker.step_inputs import ForwardShape, forward_sections
from lightserve.rope_config import RopeConfig

_PLAN_TOKENS = 256  # the plan of prefill tiles is compiled for counts of tokens that are a multiple of this


class CudaBackend:
    """Implements ``Backend``.

    Args:
        rope: The rotary embedding.
        num_heads: This rank's query heads.
        num_kv_heads: This rank's key/value heads.
        head_dim: Of queries, K and V.
        max_position: Positions are below.
        device: The GPU.
    """

    def __init__(
        self,
        rope: RopeConfig,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_position: int,
        device: torch.device,
    ) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._scale = head_dim**-0.5
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
        self._decode_rows, self._decode_lens = words[sections.decode_rows], words[sections.decode_lens]
        self._chunk_rows, self._chunk_lens = words[sections.chunk_rows], words[sections.chunk_lens]
        self._chunk_bounds = words[sections.chunk_bounds]
        self._decode_plan: DecodePlan | None = None
        if shape.num_decode:
            self._decode_plan = plan_decode(
                self._decode_rows,
                self._decode_lens,
                num_heads=self._num_heads,
                num_kv_heads=self._num_kv_heads,
                head_dim=self._head_dim,
            )
        self._prefill_plan: PrefillPlan | None = None
        if shape.num_chunks:
            self._prefill_plan = plan_prefill(
                req_to_slots,
                self._chunk_rows,
                self._chunk_bounds,
                self._chunk_lens,
                num_tokens=-(-shape.num_tokens // _PLAN_TOKENS) * _PLAN_TOKENS,
                num_heads=self._num_heads,
                num_kv_heads=self._num_kv_heads,
                copy_len=shape.copy_len,
            )

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Prepare a projection."""
        return CudaLinear(weight, bias)

    def head(self, weight: torch.Tensor) -> Linear:
        """Prepare the projection to logits."""
        return CudaHead(weight)

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor, *, first_id: int) -> torch.Tensor:
        """Look up rows of a shard of the table."""
        return embedding(token_ids, table, first_id=first_id)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise rows."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add ``x`` to ``residual`` in place and normalise the sum."""
        return add_rms_norm(x, residual, weight, eps, out=x)

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
        """Normalise (if asked) and rotate queries and keys, write K and V to the batch's slots."""
        return rope_kv_write(
            qkv,
            self._cos_sin,
            self._positions,
            self._out_slots,
            kv_layer,
            num_heads=num_heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
        )

    def attention(self, q: torch.Tensor, kv_layer: torch.Tensor) -> torch.Tensor:
        """Attend causally from every token of the batch to its request's slots.

        The decode kernel writes one row for each decode row that there is room for, zeros where none is; the prefill
        kernel then writes those of its tokens.
        """
        num_tokens, num_heads, head_dim = q.shape
        num_written = max(num_tokens, len(self._decode_rows))
        out = torch.empty(num_written, num_heads, head_dim, dtype=q.dtype, device=q.device)
        if self._decode_plan is not None:
            decode_attention(
                q,
                kv_layer,
                self._req_to_slots,
                self._decode_rows,
                self._decode_lens,
                scale=self._scale,
                plan=self._decode_plan,
                out=out,
            )
        if self._prefill_plan is not None:
            prefill_attention(
                q,
                kv_layer,
                self._req_to_slots,
                self._chunk_rows,
                self._chunk_bounds,
                self._chunk_lens,
                scale=self._scale,
                plan=self._prefill_plan,
                out=out,
            )
        return out[:num_tokens]

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Map [n, 2 * width], gate then up, to silu(gate) * up."""
        return silu_mul(gate_up)
