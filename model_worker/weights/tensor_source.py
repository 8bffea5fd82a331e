"""Where weights come from: one interface over the file formats."""

from collections.abc import Collection
from typing import Protocol

import torch

from lightserve.model_worker.weights.layout import Piece


class TensorSource(Protocol):
    """Stored tensors, named as Hugging Face names them whatever the format."""

    @property
    def origin(self) -> str:
        """The folder or file, for messages."""

    @property
    def names(self) -> Collection[str]:
        """Every stored tensor. One the format knows by a name of its own, and we do not, keeps that name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape.

        Raises:
            ConfigError: Its numbers are stored in a way that cannot be read.
        """

    def read(self, piece: Piece) -> torch.Tensor:
        """Return a piece's numbers, on the CPU, in any dtype, perhaps as a read-only view of the file."""
