"""One rank's engine: it applies plans to the rows and hands each batch to the device's runner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from lightserve.ipc.messages import NewReq, StepPlan, StepResult, unpack_int32
from lightserve.model_worker.host_batch import HostBatch
from lightserve.model_worker.req_rows import ReqRows


class StepOutput(Protocol):
    """What a step samples, perhaps still being computed."""

    @property
    def has_ended(self) -> bool:
        """Whether the device is done with it; asking does not wait."""

    def result(self) -> StepResult:
        """Wait for the step and fetch what it sampled."""


class Runner(Protocol):
    """Runs batches on one kind of device, in the order in which they are given."""

    def enter(self, new_reqs: Sequence[NewReq]) -> None:
        """Take over what sampling needs to know of requests that enter the batch."""

    def run(self, step_id: int, batch: HostBatch) -> StepOutput:
        """Launch a batch of at least one token: write its K and V, sample, keep the ids for the next step."""


RunnerT = TypeVar("RunnerT", bound=Runner, covariant=True)


@dataclass(frozen=True, slots=True)
class NoTokens:
    """The output of a step that ran nothing."""

    step_id: int
    has_ended: ClassVar[bool] = True

    def result(self) -> StepResult:
        """Return an empty result."""
        return StepResult(self.step_id, b"", b"")


class Engine(Generic[RunnerT]):
    """Runs steps in the order of their plans.

    Args:
        rows: State of the running requests.
        runner: Does the work.
    """

    def __init__(self, rows: ReqRows, runner: RunnerT) -> None:
        self.runner = runner
        self._rows = rows
        self.num_steps = 0

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepOutput:
        """Launch one step.

        Raises:
            InvariantError: The plan contradicts the state.
        """
        self._rows.release(unpack_int32(plan.released_rows))
        for req in plan.new_reqs:
            self._rows.enter(req)
        self.runner.enter(plan.new_reqs)
        batch = HostBatch.of(plan, self._rows)
        output = self.runner.run(plan.step_id, batch) if batch.num_tokens else NoTokens(plan.step_id)
        self._rows.seq_lens[batch.req_rows] = batch.seq_lens
        self.num_steps += 1
        return output
