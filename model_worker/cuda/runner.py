"""Runs batches on a GPU: one packed copy there, graphs where they fit, results read when they are asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

from lightserve.ipc.messages import NewReq, StepResult, pack_int32
from lightserve.model_worker.cuda.graph import Capturer, Graph
from lightserve.model_worker.cuda.graph_shapes import GraphShapes, eager_shape
from lightserve.model_worker.cuda.step import CudaStep
from lightserve.model_worker.cuda.step_inputs import ForwardShape, SampleShape, Sampling, StepInputs
from lightserve.model_worker.cuda.step_memory import StepMemory
from lightserve.model_worker.host_batch import HostBatch
from lightserve.model_worker.req_rows import ReqRows
from lightserve.model_worker.sampling_rows import SamplingRows


class CudaRunner:
    """Implements ``Runner``.

    Args:
        step: Launches the work.
        inputs: The layout of what a step sends.
        rows: State of the running requests.
        params: Their sampling parameters.
        shapes: What is captured.
        capturer: Captures it; when not given, every step is launched kernel by kernel.
    """

    def __init__(
        self,
        step: CudaStep,
        inputs: StepInputs,
        rows: ReqRows,
        params: SamplingRows,
        shapes: GraphShapes,
        capturer: Capturer | None,
    ) -> None:
        self._step = step
        self._inputs = inputs
        self._rows = rows
        self._params = params
        self._shapes = shapes
        device = rows.next_token.device
        memories = [StepMemory(row, inputs.num_words, results, device) for row, results in enumerate(step.results)]
        self._memories = cycle(memories)
        self._graphs: dict[ForwardShape | SampleShape, Graph] = {}
        if capturer is not None:
            self._graphs = {shape: self.capture(shape, capturer) for shape in shapes.all}

    def enter(self, new_reqs: Sequence[NewReq]) -> None:
        """Take over the parameters of requests that enter the batch."""
        for req in new_reqs:
            self._params.enter(req)
            self._step.token_counts.enter(req)

    def run(self, step_id: int, batch: HostBatch) -> "CudaOutput":
        """Launch a batch of at least one token."""
        forward_shape = self._shapes.forward_of(batch) if self._graphs else None
        forward_shape = forward_shape or eager_shape(batch)
        num_sampled = len(batch.sampled_rows)
        sample_shape = self._shapes.sample_of(num_sampled, self._sampling(batch)) if num_sampled else None
        memory = next(self._memories)
        memory.take(step_id, sample_shape.num_sampled if sample_shape is not None else 0)
        self._send(memory, batch, forward_shape, sample_shape)
        self._launch(forward_shape)
        if sample_shape is not None:
            self._launch(sample_shape)
        memory.mark()
        return CudaOutput(step_id, num_sampled, memory)

    def _sampling(self, batch: HostBatch) -> Sampling:
        if self._params.adjusts(batch, self._rows):
            return Sampling.ADJUST
        return Sampling.GREEDY if self._params.is_greedy[batch.sampled_rows].all() else Sampling.DRAW

    def _send(
        self, memory: StepMemory, batch: HostBatch, forward_shape: ForwardShape, sample_shape: SampleShape | None
    ) -> None:
        inputs = self._inputs
        end = inputs.stage_forward(memory.words, batch, forward_shape)
        start = inputs.base
        if sample_shape is not None:
            start = inputs.stage_sampling(
                memory.words, batch, sample_shape, self._params, self._rows, memory.result_row
            )
        inputs.copy(memory.pinned_words, start, end)

    def launch_empty(self, shape: ForwardShape | SampleShape) -> None:
        """Launch a shape's work, kernel by kernel, on words that are all zero: on empty requests."""
        self._inputs.clear()
        self._launch_kernels(shape)

    def capture(self, shape: ForwardShape | SampleShape, capturer: Capturer) -> Graph:
        """Capture a shape's work."""
        self._inputs.clear()
        return capturer.capture(partial(self._launch_kernels, shape))

    def _launch(self, shape: ForwardShape | SampleShape) -> None:
        graph = self._graphs.get(shape)
        if graph is not None:
            graph.replay()
        else:
            self._launch_kernels(shape)

    def _launch_kernels(self, shape: ForwardShape | SampleShape) -> None:
        if isinstance(shape, ForwardShape):
            self._step.forward(shape)
        else:
            self._step.sample(shape)


@dataclass(frozen=True, slots=True)
class CudaOutput:
    """Implements ``StepOutput``: a step on its way."""

    step_id: int
    num_sampled: int
    memory: StepMemory

    @property
    def has_ended(self) -> bool:
        """Whether the GPU is done with it."""
        return self.memory.is_done(self.step_id)

    def result(self) -> StepResult:
        """Wait for the step and read what it sampled.

        Raises:
            InvariantError: So many steps were launched since that its results are gone.
        """
        token_ids, logprobs = self.memory.read(self.step_id)
        return StepResult(
            self.step_id, pack_int32(token_ids[: self.num_sampled]), logprobs[: self.num_sampled].tobytes()
        )
