"""A model that keeps the logits it gives: for checks and tests that compare more than ids."""

import torch

from lightserve.model_worker.cpu.backend import CpuBackend
from lightserve.model_worker.cpu.runner import CpuModel
from lightserve.model_worker.models.llama import LlamaModel


class RecordingModel(LlamaModel[CpuBackend]):
    """Does what ``model`` does, with its weights.

    Attributes:
        recorded: What each call of ``logits`` gave, in order.
    """

    def __init__(self, model: CpuModel) -> None:
        self.__dict__.update(model.__dict__)
        self.recorded: list[torch.Tensor] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states to logits, and keep them."""
        self.recorded.append(super().logits(hidden))
        return self.recorded[-1]
