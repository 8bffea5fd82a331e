"""Memory of steps in flight."""

import pytest
import torch

from lightserve.errors import InvariantError
from lightserve.model_worker.cuda.step_memory import StepMemory


def make_memory() -> StepMemory:
    return StepMemory(16, 8, torch.device("cpu"))


def test_a_step_reads_back_what_it_fetched() -> None:
    memory = make_memory()
    memory.take(3)
    memory.fetch(torch.tensor([[5, 6], [7, 8]], dtype=torch.int32))
    memory.mark()
    assert memory.read(3).tolist() == [[5, 6], [7, 8]]


def test_a_step_that_fetched_nothing_reads_nothing() -> None:
    memory = make_memory()
    memory.take(3)
    memory.fetch(torch.ones(2, 4, dtype=torch.int32))
    memory.take(4)
    assert memory.read(4).shape == (2, 0)


def test_results_that_have_given_way_to_those_of_another_step_are_not_mistaken_for_them() -> None:
    memory = make_memory()
    memory.take(3)
    memory.take(7)
    with pytest.raises(InvariantError, match="step 3"):
        memory.read(3)
