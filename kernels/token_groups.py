"""The groups of a row's tokens that may hold one that is kept, and passes over the tokens of these groups alone.

A token's distance is how far it scores below the best, over the temperature: its mass is exp(-distance). Groups of
``GROUP`` tokens whose nearest lies beyond a bound are passed over; those that are listed are read ``TILE`` tokens at a
time, in order of ids.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from lightserve.kernels.attention import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)


class Row(NamedTuple):
    """A row of scores, within a kernel, and which of its groups are listed.

    Attributes:
        scores: Points to the first token's.
        best: The largest score.
        inverse_temperature: float32.
        vocab_size: Tokens of the row.
        groups: Points to the numbers of the listed groups, side by side.
        num_listed: How many groups are listed.
    """

    scores: tl.tensor
    best: tl.tensor
    inverse_temperature: tl.tensor
    vocab_size: tl.tensor
    groups: tl.tensor
    num_listed: tl.tensor


@triton.jit
def distance_of(score, best, inverse_temperature):
    """How far below the best tokens score; never negative."""
    return (best - score) * inverse_temperature


@triton.jit
def mass_at(distance):
    """Give exp(-distance)."""
    return tl.exp2(distance * -_LOG2_E)


@triton.jit
def list_groups(nearest, upper, num_groups, groups):
    """Write the groups that hold a token within ``upper`` side by side; count them."""
    group = tl.arange(0, nearest.shape[0])
    listed = ((nearest <= upper) & (group < num_groups)).to(tl.int32)
    tl.store(groups + tl.cumsum(listed) - 1, group, mask=listed > 0)
    tl.debug_barrier()  # the program's other threads read them
    return tl.sum(listed)


@triton.jit
def _load_tile(row, tile, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Load a tile of the listed groups: the tokens' distances, infinite where there is none, and ids."""
    index = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    group = tl.load(row.groups + index, mask=index < row.num_listed, other=0)
    token_id = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # in two dimensions: the loads stay wide
    exists = (index < row.num_listed)[:, None] & (token_id < row.vocab_size)
    score = tl.load(row.scores + token_id, mask=exists, other=float("-inf")).to(tl.float32)
    distance = distance_of(score, row.best, row.inverse_temperature)
    return tl.reshape(distance, (TILE,)), tl.reshape(token_id, (TILE,))


@triton.jit
def gather(row, low, high, distances, candidates, TILE: tl.constexpr, GROUP: tl.constexpr, CANDIDATES: tl.constexpr):
    """Write the tokens whose distances lie in (low, high] side by side; count them, but stop when no more fit."""
    count = 0
    tile = 0
    while (tile * (TILE // GROUP) < row.num_listed) & (count <= CANDIDATES):
        distance, token_id = _load_tile(row, tile, TILE, GROUP)
        chosen = ((low < distance) & (distance <= high) & (distance < float("inf"))).to(tl.int32)
        index = count + tl.cumsum(chosen) - 1
        fits = (chosen > 0) & (index < CANDIDATES)
        tl.store(distances + index, distance, mask=fits)
        tl.store(candidates + index, token_id, mask=fits)
        count += tl.sum(chosen)
        tile += 1
    tl.debug_barrier()  # the program's other threads read them
    return count


@triton.jit
def weigh(row, limit, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Count and weigh the tokens within ``limit``."""
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.float32)
    for tile in tl.range(0, tl.cdiv(row.num_listed, TILE // GROUP), num_stages=3):
        distance, _ = _load_tile(row, tile, TILE, GROUP)
        kept = (distance <= limit) & (distance < float("inf"))
        count += kept.to(tl.int32)
        mass += tl.where(kept, mass_at(distance), 0.0)
    return tl.sum(count), tl.sum(mass)


@triton.jit
def mass_of_tiles(row, limit, tile_mass_ptr, BLOCK_TILES: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Weigh the tokens within ``limit`` tile by tile; ``tile_mass_ptr`` points to room for [BLOCK_TILES] masses."""
    num_tiles = tl.cdiv(row.num_listed, TILE // GROUP)
    index = tl.arange(0, BLOCK_TILES)
    for tile in tl.range(0, num_tiles, num_stages=3):
        distance, _ = _load_tile(row, tile, TILE, GROUP)
        mass = tl.sum(tl.where(distance <= limit, mass_at(distance), 0.0))
        tl.store(tile_mass_ptr, mass, mask=index == tile)
    tl.debug_barrier()
    return tl.load(tile_mass_ptr, mask=index < num_tiles, other=0)


@triton.jit
def first_above(row, limit, u, tile_mass, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Find the token at which the mass within ``limit``, in order of ids, exceeds ``u`` times all of it."""
    target = u * tl.sum(tile_mass)
    tile = index_above(tile_mass, target)
    before = tl.sum(tl.where(tl.arange(0, tile_mass.shape[0]) < tile, tile_mass, 0.0))
    distance, token_id = _load_tile(row, tile, TILE, GROUP)
    index = index_above(tl.where(distance <= limit, mass_at(distance), 0.0), target - before)
    return tl.sum(tl.where(tl.arange(0, TILE) == index, token_id, 0))


@triton.jit
def index_above(mass, target):
    """Find the first index at which the running sum of ``mass`` exceeds ``target``, the last with mass if none does."""
    index = tl.arange(0, mass.shape[0])
    above = (tl.cumsum(mass) > target) & (mass > 0)
    last = tl.max(tl.where(mass > 0, index, 0))
    return tl.minimum(tl.min(tl.where(above, index, mass.shape[0])), last)
