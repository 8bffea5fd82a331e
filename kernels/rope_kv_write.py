"""Rotary position embedding, query/key norms before it, and the write of K and V into their slots: one pass over qkv.

Rotation is by halves (as in Llama's checkpoints for Hugging Face): with x = (a, b), each head_dim / 2 wide, and the
position's angles, rope(x) = (a·cos - b·sin, b·cos + a·sin). One program per token and block of heads; float32 inside.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lightserve.kernels.launch import dependent_launch, wait_for_previous
from lightserve.kernels.rms_norm import rms_norm_reference


@dataclass(frozen=True)
class Rotation:
    """What is done to queries and keys before they meet.

    Attributes:
        cos_sin: [max_position, head_dim] float32, contiguous: head_dim / 2 cosines, then as many sines.
        q_norm: [head_dim], RMSNorm of every query head before the rotation.
        k_norm: [head_dim], the same for keys; both or neither.
        eps: Of these norms.

    Raises:
        ValueError: One norm comes without the other, or ``cos_sin`` is not contiguous.
    """

    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0

    def __post_init__(self) -> None:
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("q_norm and k_norm go together")
        if not self.cos_sin.is_contiguous():
            raise ValueError(f"cos_sin {tuple(self.cos_sin.shape)} must be contiguous")


def rope_kv_write_reference(
    qkv: torch.Tensor,
    rotation: Rotation,
    positions: torch.Tensor,
    out_slots: torch.Tensor,
    kv_layer: torch.Tensor,
    *,
    num_heads: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what ``rope_kv_write`` does, in plain torch."""
    num_kv_heads, head_dim = kv_layer.shape[2:]
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if rotation.q_norm is not None and rotation.k_norm is not None:
        q = rms_norm_reference(q, rotation.q_norm, rotation.eps)
        k = rms_norm_reference(k, rotation.k_norm, rotation.eps)
    angles = rotation.cos_sin[positions.long()].unsqueeze(1)  # [num_tokens, 1, head_dim]
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


def rope_kv_write(
    qkv: torch.Tensor,
    rotation: Rotation,
    positions: torch.Tensor,
    out_slots: torch.Tensor,
    kv_layer: torch.Tensor,
    *,
    num_heads: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the queries and keys of ``qkv``; write keys and values into the cache and return the queries.

    Args:
        qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim] contiguous: queries, keys, values.
        rotation: Of queries and keys.
        positions: [num_tokens] int32.
        out_slots: [num_tokens] int32.
        kv_layer: [num_slots, 2, num_kv_heads, head_dim], one layer of the cache, changed at ``out_slots``.
        num_heads: Query heads.
        out: [num_tokens, num_heads, head_dim] contiguous; made when not given.

    Raises:
        ValueError: The shapes do not fit.
    """
    num_tokens = qkv.shape[0]
    _, _, num_kv_heads, head_dim = kv_layer.shape
    rows = num_heads + 2 * num_kv_heads
    if qkv.shape[1] != rows * head_dim or not qkv.is_contiguous():
        raise ValueError(f"qkv {tuple(qkv.shape)} must be contiguous, {rows} heads of {head_dim} wide")
    if kv_layer.stride(-1) != 1 or rotation.cos_sin.shape[1] != head_dim:
        raise ValueError(
            f"a head of kv_layer must be contiguous and as wide as cos_sin {tuple(rotation.cos_sin.shape)}"
        )
    out = qkv.new_empty(num_tokens, num_heads, head_dim) if out is None else out
    if num_tokens == 0:
        return out
    block_heads = min(triton.next_power_of_2(rows), 8)
    _rope_kv_write_kernel[(num_tokens, triton.cdiv(rows, block_heads))](
        qkv,
        rotation.cos_sin,
        positions,
        out_slots,
        kv_layer,
        qkv if rotation.q_norm is None else rotation.q_norm,
        qkv if rotation.k_norm is None else rotation.k_norm,
        out,
        rotation.eps,
        *kv_layer.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=block_heads,
        NORM=rotation.q_norm is not None,
        num_warps=2,
        **dependent_launch(qkv),
    )
    return out


@triton.jit
def _rope_kv_write_kernel(
    qkv,
    cos_sin,
    positions,
    out_slots,
    kv_layer,
    q_norm,
    k_norm,
    out,
    eps,
    slot_stride,
    kv_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]  # queries, keys, values in one count
    column = tl.arange(0, BLOCK_HALF)[None, :]
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (column < HALF)
    wait_for_previous(PDL)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(out_slots + token).to(tl.int64)
    cos = tl.load(cos_sin + position * (2 * HALF) + column, mask=column < HALF, other=0)
    sin = tl.load(cos_sin + position * (2 * HALF) + HALF + column, mask=column < HALF, other=0)
    cos = tl.where(is_value, 1.0, cos)
    sin = tl.where(is_value, 0.0, sin)
    source = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * 2 * HALF) + head * (2 * HALF) + column
    a = tl.load(source, mask=inside, other=0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0).to(tl.float32)
    if NORM:
        mean_square = tl.sum(a * a + b * b, axis=1, keep_dims=True) / (2 * HALF)
        factor = tl.where(is_value, 1.0, tl.rsqrt(mean_square + eps))
        dtype = qkv.dtype.element_ty
        a = _apply_gain(a * factor, _gain(q_norm, k_norm, column, is_query, is_value, HALF), dtype)
        b = _apply_gain(b * factor, _gain(q_norm + HALF, k_norm + HALF, column, is_query, is_value, HALF), dtype)
    low = (a * cos - b * sin).to(kv_layer.dtype.element_ty)
    high = (b * cos + a * sin).to(kv_layer.dtype.element_ty)
    query = out + token * (NUM_HEADS * 2 * HALF) + head * (2 * HALF) + column
    tl.store(query, low, mask=inside & is_query)
    tl.store(query + HALF, high, mask=inside & is_query)
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    target = kv_layer + slot * slot_stride + is_value.to(tl.int64) * kv_stride + kv_head * head_stride + column
    tl.store(target, low, mask=inside & (head >= NUM_HEADS))
    tl.store(target + HALF, high, mask=inside & (head >= NUM_HEADS))


@triton.jit
def _gain(q_norm, k_norm, column, is_query, is_value, HALF: tl.constexpr):
    of_query = tl.load(q_norm + column, mask=column < HALF, other=0).to(tl.float32)
    of_key = tl.load(k_norm + column, mask=column < HALF, other=0).to(tl.float32)
    return tl.where(is_value, 1.0, tl.where(is_query, of_query, of_key))


@triton.jit
def _apply_gain(normal, gain, dtype):
    """Multiply by a norm's gain, and round as a norm does that stores its result."""
    return (normal * gain).to(dtype).to(tl.float32)


@triton.jit
def rotate(heads, column, inside, angles, gain, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """Load heads, normalise them if asked, and rotate them.

    Each column reads its partner's value too, for a product takes its operand whole. ``_rope_kv_write_kernel`` goes by
    halves instead and loads each value once: with this function it has 50 to 80 % more instructions (sm_90).

    Args:
        heads: [rows, 1] pointers, where each row's head begins.
        column: [1, columns], place within a head.
        inside: [rows, columns], what there is; each row's columns of one head. Zeros elsewhere.
        angles: Where the position's cosines begin.
        gain: [HEAD_DIM], of the norm.
        eps: Of the norm.
        HEAD_DIM: Width of a head.
        NORM: Whether there is a norm.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    within = column < HEAD_DIM
    # all that is loaded is on its way before any of it is converted
    value = tl.load(heads + column, mask=inside, other=0)
    other = tl.load(heads + partner, mask=inside, other=0)
    cos = tl.load(angles + column % HALF, mask=within, other=0)
    sin = tl.load(angles + HALF + column % HALF, mask=within, other=0)
    dtype = value.dtype
    value, other = value.to(tl.float32), other.to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / HEAD_DIM + eps)
        value = _apply_gain(value * factor, tl.load(gain + column, mask=within, other=0).to(tl.float32), dtype)
        other = _apply_gain(other * factor, tl.load(gain + partner, mask=within, other=0).to(tl.float32), dtype)
    return (value * cos + tl.where(column < HALF, -other, other) * sin).to(dtype)
