"""A uniform number by counter: a hash of (seed, position) and nothing else, three rounds of MurmurHash3's finaliser.

So a request's draw depends neither on its neighbours nor on its place in the batch, and there is no state to keep.
"""

import torch
import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B9)  # 2**32 over the golden ratio
_FIRST_FACTOR = tl.constexpr(0x85EBCA6B)
_SECOND_FACTOR = tl.constexpr(0xC2B2AE35)
_MASK32 = tl.constexpr(0xFFFFFFFF)
_STEP = tl.constexpr(2.0**-24)  # between neighbouring numbers


def uniform_reference(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hash (seed, position) to a uniform float32 in [0, 1).

    Args:
        seeds: [n] int64, in [0, 2**63).
        positions: [n] int32 or int64, absolute position of the token to be sampled.

    Returns:
        [n] float32, a multiple of 2**-24.
    """
    h = _mix_reference((seeds & _MASK32.value) ^ _GOLDEN.value)
    h = _mix_reference(h ^ (seeds >> 32))
    h = _mix_reference((h + positions.long() * _GOLDEN.value) & _MASK32.value)
    return (h >> 8).float().mul(_STEP.value)


def _mix_reference(h: torch.Tensor) -> torch.Tensor:
    h = h ^ (h >> 16)
    h = (h * _FIRST_FACTOR.value) & _MASK32.value
    h = h ^ (h >> 13)
    h = (h * _SECOND_FACTOR.value) & _MASK32.value
    return h ^ (h >> 16)


@triton.jit
def uniform(seed, position):
    """Do what ``uniform_reference`` does, bit for bit."""
    h = _mix((seed & _MASK32).to(tl.uint32) ^ _GOLDEN)
    h = _mix(h ^ (seed >> 32).to(tl.uint32))
    h = _mix(h + position.to(tl.uint32) * _GOLDEN)
    return (h >> 8).to(tl.float32) * _STEP


@triton.jit
def _mix(h):
    h = h ^ (h >> 16)
    h = h * _FIRST_FACTOR
    h = h ^ (h >> 13)
    h = h * _SECOND_FACTOR
    return h ^ (h >> 16)
