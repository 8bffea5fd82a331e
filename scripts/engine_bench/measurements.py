"""What is measured of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from benchmark.traces import TraceRow
from script_tools.plain_ids import draw_ids

from engine_bench.engine_host import EngineHost, Step, Work
from lightserve.model_config import ModelConfig
from lightserve.model_worker.profiling import GpuProfile

OUTPUT_LENS = (16, 144)  # whose difference, divided by their distance, is a decode step


@dataclass(frozen=True)
class DecodeTime:
    """Time of a decode step.

    Attributes:
        batch: Requests.
        prompt_len: Of each.
        step_ms: From the difference between two output lengths, the median over repeats.
        repeats_ms: The same of each repeat.
        turn_p50_ms: Median time from result to result while all decode, of the last run.
        turn_p99_ms: The same, 99th percentile.
        launch_ms: The worker's own time to launch a step, mean over the last run.
    """

    batch: int
    prompt_len: int
    step_ms: float
    repeats_ms: tuple[float, ...]
    turn_p50_ms: float
    turn_p99_ms: float
    launch_ms: float


@dataclass(frozen=True)
class PrefillTime:
    """Time of one prompt, from its arrival to its first token; and the rate at which its products were done.

    Attributes:
        prompt_len: Its tokens.
        ms: The median over repeats.
        repeats_ms: The same of each repeat.
        tflops: By the median.
    """

    prompt_len: int
    ms: float
    repeats_ms: tuple[float, ...]
    tflops: float


@dataclass(frozen=True)
class TraceTime:
    """A trace whose requests all arrive at once."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    requests_per_s: float
    output_tokens_per_s: float
    num_steps: int


class Meter:
    """Measures one engine.

    Args:
        host: The engine.
    """

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._random = np.random.default_rng(0)

    def decode(self, batch: int, prompt_len: int, output_lens: tuple[int, int], repeats: int) -> DecodeTime:
        """Time a decode step at one batch size."""
        short, long = output_lens
        steps_ms = []
        self._host.run(self._works(batch, prompt_len, 2))
        for _ in range(repeats):
            short_s = self._host.run(self._works(batch, prompt_len, short))
            before = self._host.stats()
            long_s = self._host.run(self._works(batch, prompt_len, long))
            steps_ms.append((long_s - short_s) / (long - short) * 1000)
        after = self._host.stats()
        turns = _decode_turns_ms(self._host.steps, batch)
        return DecodeTime(
            batch,
            prompt_len,
            median(steps_ms),
            tuple(steps_ms),
            float(np.percentile(turns, 50)),
            float(np.percentile(turns, 99)),
            (after.launch_s - before.launch_s) / (after.num_steps - before.num_steps) * 1000,
        )

    def prefill(self, prompt_len: int, repeats: int) -> PrefillTime:
        """Time one prompt on an idle engine."""
        self._host.run(self._works(1, prompt_len, 1))
        repeats_ms = tuple(1000 * self._host.run(self._works(1, prompt_len, 1)) for _ in range(repeats))
        flops, ms = prefill_flops(self._host.boot.model, prompt_len), median(repeats_ms)
        return PrefillTime(prompt_len, ms, repeats_ms, flops / ms / 1e9)

    def trace(self, rows: Sequence[TraceRow]) -> TraceTime:
        """Run a trace, all requests at once."""
        works = [self._work(row.prompt_len, row.output_len) for row in rows]
        seconds = self._host.run(works)
        output_tokens = sum(work.output_len for work in works)
        return TraceTime(
            num_requests=len(works),
            prompt_tokens=sum(len(work.prompt_ids) for work in works),
            output_tokens=output_tokens,
            seconds=seconds,
            requests_per_s=len(works) / seconds,
            output_tokens_per_s=output_tokens / seconds,
            num_steps=len(self._host.steps),
        )

    def profile(self, batch: int, prompt_len: int, num_steps: int, path: Path) -> GpuProfile:
        """Trace the GPU over decode steps at one batch size, prompts included."""
        return self._host.profile(self._works(batch, prompt_len, num_steps), path)

    def _works(self, count: int, prompt_len: int, output_len: int) -> list[Work]:
        return [self._work(prompt_len, output_len) for _ in range(count)]

    def _work(self, prompt_len: int, output_len: int) -> Work:
        prompt_ids = draw_ids(self._random, self._host.boot.model.vocab_size, prompt_len)
        return Work(prompt_ids.tolist(), output_len)


def prefill_flops(model: ModelConfig, prompt_len: int) -> float:
    """Count the operations of one prompt: all layers over all tokens, causal attention, one row of logits."""
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    width = model.num_heads * model.head_dim
    weights = model.num_layers * model.hidden_size * (qkv + width + 3 * model.intermediate_size)
    attention = model.num_layers * 2 * width * prompt_len  # q·k and p·v, half of each left out
    return 2.0 * prompt_len * weights + prompt_len * attention + 2.0 * model.hidden_size * model.vocab_size


def _decode_turns_ms(steps: Sequence[Step], batch: int) -> list[float]:
    """Times from result to result, of steps in which ``batch`` requests decode and nothing else runs."""
    return [
        (step.done_s - before.done_s) * 1000
        for before, step in pairwise(steps)
        if step.num_decode == batch and step.num_prefill_tokens == 0 and before.num_prefill_tokens == 0
    ] or [float("nan")]
