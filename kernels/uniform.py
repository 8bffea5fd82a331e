"""A uniform number by counter: a hash of (seed, position) and nothing else, three rounds of MurmurHash3's finaliser.

So a request's draw depends neither on its neighbours nor on its place in the batch, and there is no state to keep.
"""

import torch
import triton
import triton.language as tl

_GOLDEN = 0x9E3779B9
_MASK32 = 0xFFFFFFFF


def uniform_reference(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hash (seed, position) to a uniform float32 in [0, 1).

    Args:
        seeds: [n] int64, in [0, 2**63).
        positions: [n] int32 or int64, absolute position of the token to be sampled.

    Returns:
        [n] float32, a multiple of 2**-24.
    """
    h = _mix_reference((seeds & _MASK32) ^ _GOLDEN)
    h = _mix_reference(h ^ (seeds >> 32))
    h = _mix_reference((h + positions.long() * _GOLDEN) & _MASK32)
    return (h >> 8).float() * 2**-24


def _mix_reference(h: torch.Tensor) -> torch.Tensor:
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _MASK32
    return h ^ (h >> 16)


@triton.jit
def uniform(seed, position):
    """Do what ``uniform_reference`` does, bit for bit."""
    h = _mix((seed & 0xFFFFFFFF).to(tl.uint32) ^ 0x9E3779B9)
    h = _mix(h ^ (seed >> 32).to(tl.uint32))
    h = _mix(h + position.to(tl.uint32) * 0x9E3779B9)
    return (h >> 8).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _mix(h):
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)
