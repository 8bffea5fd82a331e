"""The model's part of a step by itself: no router, no sampling, no copy, only what a captured graph holds."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from lightserve.model_worker.cuda.blueprint import CudaBlueprint
from lightserve.model_worker.cuda.graph import Capturer, Graph
from lightserve.model_worker.cuda.graph_shapes import eager_shape
from lightserve.model_worker.cuda.step_inputs import ForwardShape
from lightserve.model_worker.host_batch import HostBatch

_REPLAYS, _PROFILED = 15, 3


@dataclass(frozen=True)
class StepTime:
    """Time of one step's model.

    Attributes:
        num_decode: Requests that decode.
        chunk_lens: Tokens of each prompt beside them.
        num_tokens: What the captured shape has room for.
        ms: Median over replays.
    """

    num_decode: int
    chunk_lens: Sequence[int]
    num_tokens: int
    ms: float


@dataclass(frozen=True)
class KernelShare:
    """A kernel's part in a step.

    Attributes:
        name: The kernel's.
        count: Launches in a step.
        until_next_us: Mean time from its start to the start of the next kernel: these add up to the step, which their
            own durations do not where kernels overlap.
        duration_us: Mean of its own.
    """

    name: str
    count: float
    until_next_us: float
    duration_us: float


class ModelSteps:
    """Captures steps of one model and replays them.

    Args:
        blueprint: The model, and how an engine around it is made.
        num_slots: Of the pool.
        capturer: Captures the steps.
    """

    def __init__(self, blueprint: CudaBlueprint, num_slots: int, capturer: Capturer) -> None:
        self._step, self._inputs, self._rows = blueprint.build_step(num_slots)
        self._shapes = blueprint.shapes
        self._num_slots = num_slots
        self._capturer = capturer
        # Kept: with the last graph torch would give up the memory that they share, and with a step's words those, which
        # a kernel may still have to read.
        self._graphs: list[Graph] = []
        self._words: list[torch.Tensor] = []
        self._random = np.random.default_rng(0)
        slots = self._random.integers(0, num_slots, tuple(self._rows.req_to_slots.shape), dtype=np.int32)
        self._rows.req_to_slots.copy_(torch.from_numpy(slots))
        for kv_layer in self._step.kv_cache.layers:
            kv_layer.normal_()

    def time(
        self, num_decode: int, context: int, chunk_lens: Sequence[int] = (), *, num_replays: int = _REPLAYS
    ) -> StepTime:
        """Time a step whose decode rows have ``context`` tokens, this step's included, beside whole prompts.

        A fifth as many replays warm up.
        """
        shape, graph = self._capture(num_decode, context, chunk_lens)
        for _ in range(num_replays // 5):
            graph.replay()
        ms = median(_ms(graph.replay) for _ in range(num_replays))
        return StepTime(num_decode, chunk_lens, shape.num_tokens, ms)

    def kernels(self, num_decode: int, context: int, chunk_lens: Sequence[int] = ()) -> list[KernelShare]:
        """Trace the same step on the GPU; the kernels in order of the time until the next one."""
        _, graph = self._capture(num_decode, context, chunk_lens)
        graph.replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(_PROFILED):
                graph.replay()
            torch.cuda.synchronize()
        events = [event for event in trace.events() or () if event.device_type.name == "CUDA"]
        return kernel_shares([(e.time_range.start, e.time_range.end, e.name) for e in events], _PROFILED)

    def _capture(self, num_decode: int, context: int, chunk_lens: Sequence[int]) -> tuple[ForwardShape, Graph]:
        batch = self._batch(num_decode, context, chunk_lens)
        shape = self._shapes.forward_of(batch) or eager_shape(batch)
        words = torch.zeros(self._inputs.num_words, dtype=torch.int32, pin_memory=torch.cuda.is_available())
        self._words.append(words)
        end = self._inputs.stage_forward(words.numpy(), batch, shape)
        self._inputs.copy(words, self._inputs.base, end)
        self._graphs.append(self._capturer.capture(partial(self._step.forward, shape)))
        return shape, self._graphs[-1]

    def _batch(self, num_decode: int, context: int, chunk_lens: Sequence[int]) -> HostBatch:
        extend_lens = np.array([1] * num_decode + list(chunk_lens), dtype=np.int32)
        num_tokens = int(extend_lens.sum())
        return HostBatch(
            num_decode=num_decode,
            req_rows=np.arange(len(extend_lens), dtype=np.int32),
            starts=np.array([context - 1] * num_decode + [0] * len(chunk_lens), dtype=np.int32),
            extend_lens=extend_lens,
            is_sampled=np.ones(len(extend_lens), dtype=np.bool_),
            token_ids=np.zeros(num_tokens, dtype=np.int32),
            out_slots=self._random.permutation(self._num_slots)[:num_tokens].astype(np.int32),
        )


def kernel_shares(events: Sequence[tuple[float, float, str]], num_steps: int) -> list[KernelShare]:
    """Sum up kernels by name.

    Args:
        events: Start and end in µs, and the name, of every kernel of ``num_steps`` equal steps.
        num_steps: How many there were.
    """
    ordered = sorted(events)
    starts = [start for start, _, _ in ordered] + [max((end for _, end, _ in ordered), default=0.0)]
    until_next: dict[str, list[float]] = {}
    durations: dict[str, list[float]] = {}
    for (start, end, name), following in zip(ordered, starts[1:], strict=True):
        until_next.setdefault(name, []).append(following - start)
        durations.setdefault(name, []).append(end - start)
    shares = [
        KernelShare(name, len(times) / num_steps, sum(times) / len(times), sum(durations[name]) / len(times))
        for name, times in until_next.items()
    ]
    return sorted(shares, key=lambda share: -share.count * share.until_next_us)


def _ms(work: Callable[[], None]) -> float:
    """Time work: on the GPU by events, where it is interpreted by the clock."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
