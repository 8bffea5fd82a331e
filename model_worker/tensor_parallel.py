"""The ranks of one model: sums and gathers between them. One rank needs no process group and pays nothing."""

import os
import sys
from typing import Protocol

import torch
import torch.distributed as dist


class Ranks(Protocol):
    """What the model asks of its peers. Every rank calls the same methods in the same order."""

    rank: int
    world_size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Join [n, columns] of every rank to [n, world_size * columns], in order of rank."""


class SingleRank:
    """The whole model on one rank."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x


class GroupRanks:
    """A torch.distributed group: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        dist.all_reduce(x)
        return x

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Join [n, columns] of every rank to [n, world_size * columns], in order of rank."""
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)


def join_ranks(run_dir: str, rank: int, world_size: int, device: torch.device) -> Ranks:
    """Meet the other ranks, through a file in the run directory and the loopback interface.

    Returns when every rank has come.
    """
    if world_size == 1:
        return SingleRank()
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{run_dir}/ranks",
        rank=rank,
        world_size=world_size,
    )
    return GroupRanks(rank, world_size)
