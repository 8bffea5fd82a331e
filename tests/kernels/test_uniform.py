"""The uniform number of a seed and a position."""

import torch
import triton
import triton.language as tl

from lightserve.kernels.uniform import uniform, uniform_reference
from tests.kernels.kit import DEVICE


@triton.jit
def _fill_kernel(seeds, positions, out):  # type: ignore[no-untyped-def]  # what a kernel takes has no Python types
    i = tl.program_id(0)
    tl.store(out + i, uniform(tl.load(seeds + i), tl.load(positions + i)))


def test_it_is_the_same_bits_in_torch_and_triton() -> None:
    seeds = torch.randint(0, 2**63 - 1, (200,), dtype=torch.int64, device=DEVICE)
    positions = torch.randint(0, 2**31 - 1, (200,), dtype=torch.int32, device=DEVICE)
    out = torch.full((200,), float("nan"), device=DEVICE)
    _fill_kernel[(200,)](seeds, positions, out)
    assert torch.equal(out, uniform_reference(seeds, positions))
    assert ((out >= 0) & (out < 1)).all()


def test_numbers_of_neighbouring_seeds_and_positions_look_independent() -> None:
    grid = uniform_reference(torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200)).view(200, 200)
    assert abs(grid.mean().item() - 0.5) < 0.005
    assert abs(torch.corrcoef(torch.stack((grid[:-1].flatten(), grid[1:].flatten())))[0, 1].item()) < 0.02
    assert abs(torch.corrcoef(torch.stack((grid[:, :-1].flatten(), grid[:, 1:].flatten())))[0, 1].item()) < 0.02
