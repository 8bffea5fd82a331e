"""Figures of an engine without a server around it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine_bench.engine_host import open_engine
from engine_bench.measurements import OUTPUT_LENS, Meter
from engine_bench.result_table import Figure, Measured
from lightserve.config import ServerConfig


@dataclass(frozen=True)
class EngineRuns:
    """What is measured of one engine.

    Attributes:
        name: Of the model, as figures name it.
        config: Of the engine.
        prompt_len: Of the prompts of decode steps.
        batches: Sizes of decode steps.
        prefill_lens: Lengths of single prompts.
    """

    name: str
    config: ServerConfig
    prompt_len: int
    batches: Sequence[int]
    prefill_lens: Sequence[int] = ()

    def decode_name(self, batch: int) -> str:
        """Name the figure of a decode step."""
        return f"{self.name} decode, prompts of {self.prompt_len}, batch {batch}"

    def prefill_name(self, prompt_len: int) -> str:
        """Name the figure of a prompt."""
        return f"{self.name} prefill, {prompt_len:,} tokens"


def measure_engine(runs: EngineRuns, repeats: int) -> Iterator[Measured]:
    """Start an engine and time its steps.

    Raises:
        ConfigError: The settings do not fit the machine or the model.
        EngineError: A worker ended before it was ready, or a request failed.
        InvariantError: A worker ended later.
    """
    with open_engine(runs.config) as host:
        yield Measured([], {"start_s": host.start_s, "num_slots": host.num_slots, "note": host.note})
        meter = Meter(host)
        for batch in runs.batches:
            decode = meter.decode(batch, runs.prompt_len, OUTPUT_LENS, repeats)
            yield Measured([Figure(runs.decode_name(batch), decode.repeats_ms)], decode)
        for prompt_len in runs.prefill_lens:
            prefill = meter.prefill(prompt_len, repeats)
            yield Measured([Figure(runs.prefill_name(prompt_len), prefill.repeats_ms)], prefill)
        yield Measured([], host.stats())
