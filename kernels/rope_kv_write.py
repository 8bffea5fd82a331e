"""Rotary position embedding, query/key norms before it, and the write of K and V into their slots: one pass over qkv.

Rotation is by halves (as in Llama's checkpoints for Hugging Face): with x = (a, b), each head_dim / 2 wide, and the
position's angles, rope(x) = (a·cos - b·sin, b·cos + a·sin). One program per token and block of heads; float32 inside.
"""

import torch

from lightserve.kernels.rms_norm import rms_norm_reference


def rope_kv_write_reference(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    out_slots: torch.Tensor,
    kv_layer: torch.Tensor,
    *,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what ``rope_kv_write`` does, in plain torch."""
    num_kv_heads, head_dim = kv_layer.shape[2:]
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = rms_norm_reference(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm_reference(k, k_norm, eps)
    angles = cos_sin[positions.long()].unsqueeze(1)  # [num_tokens, 1, head_dim]
    slots = out_slots.long()
    kv_layer[slots, 0] = rotate_reference(k, angles)
    kv_layer[slots, 1] = v.to(kv_layer.dtype)
    rotated = rotate_reference(q, angles)
    return rotated if out is None else out.copy_(rotated)


def rotate_reference(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` [..., head_dim] by the angles ``cos_sin`` [..., head_dim] (cosines, then sines)."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos_sin.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
