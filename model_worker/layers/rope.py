"""Rotary embedding: the angles of positions, scaled as the checkpoint asks.

References: linear interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071), Llama 3.1's piecewise scaling.
"""

import math

import torch

from lightserve.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Compute the angle that each pair of dimensions turns per position.

    Returns:
        [head_dim / 2] float32.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default":
            pass
        case "linear":
            inv_freq = inv_freq / rope.factor
        case "llama3":
            inv_freq = _scale_llama3(inv_freq, rope)
        case "yarn":
            inv_freq = _scale_yarn(inv_freq, rope, head_dim)
    if rope.factors is not None:
        inv_freq = inv_freq / torch.tensor(rope.factors, dtype=torch.float32)
    return inv_freq


def cos_sin(positions: torch.Tensor, inv_freq: torch.Tensor, attention_factor: float) -> torch.Tensor:
    """Compute cosines and sines of positions.

    Args:
        positions: [n], any integer type.
        inv_freq: [head_dim / 2] float32, from ``inverse_frequencies``.
        attention_factor: Multiplies both; 1 except for YaRN.

    Returns:
        [n, head_dim] float32: head_dim / 2 cosines, then as many sines.
    """
    angles = torch.outer(positions.float(), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor


def _scale_llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    # Wavelengths longer than original / low_freq_factor are interpolated, shorter than original / high_freq_factor are
    # kept, and those between pass smoothly from one to the other.
    rotations = rope.original_max_position * inv_freq / (2 * math.pi)
    keep = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / rope.factor)


def _scale_yarn(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    first = _dimension_of(rope.beta_fast, rope, head_dim)
    last = _dimension_of(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = max(last - first, 0.001)
    interpolate = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return inv_freq * (1 - interpolate + interpolate / rope.factor)


def _dimension_of(rotations: float, rope: RopeConfig, head_dim: int) -> float:
    """Which pair of dimensions turns so many times over the original context."""
    span = rope.original_max_position / (rotations * 2 * math.pi)
    return head_dim * math.log(span) / (2 * math.log(rope.theta))
