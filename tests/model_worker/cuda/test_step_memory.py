"""Memory of steps in flight."""

import pytest
import torch

from lightserve.errors import InvariantError
from lightserve.model_worker.cuda.step_memory import StepMemory


def make_memory(results: list[int]) -> StepMemory:
    return StepMemory(0, 16, torch.tensor(results, dtype=torch.int32), torch.device("cpu"))


def test_a_step_reads_what_was_left_for_its_rows() -> None:
    memory = make_memory([5, 6, 7, 8, -1, -1])
    memory.take(3, 2)
    memory.mark()
    assert memory.read(3).tolist() == [[5, 6], [7, 8]]


def test_a_step_that_samples_nothing_reads_nothing() -> None:
    memory = make_memory([5, 6, 7, 8])
    memory.take(3, 2)
    memory.take(4, 0)
    assert memory.read(4).shape == (2, 0)


def test_results_that_have_given_way_to_those_of_another_step_are_not_mistaken_for_them() -> None:
    memory = make_memory([5, 6])
    memory.take(3, 1)
    memory.take(7, 1)
    with pytest.raises(InvariantError, match="step 3"):
        memory.read(3)


def test_memory_is_given_to_a_step_only_when_the_one_before_is_done_with_it() -> None:
    memory, waited_for = make_memory([5, 6]), []

    class Done:
        def synchronize(self) -> None:
            waited_for.append(memory._step_id)

    memory.take(3, 1)
    memory._done = Done()  # type: ignore[assignment]  # for a torch.cuda.Event
    memory.take(5, 1)
    assert waited_for == [3]
