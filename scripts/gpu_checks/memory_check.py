"""The largest steps there can be, and every slot of the pool that the engine chose for itself in use at once."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from engine_bench.engine_host import EngineError, EngineHost, Work, open_engine
from script_tools.plain_ids import draw_ids

from gpu_checks.gpu_memory import used_mib
from lightserve.config import ServerConfig
from lightserve.sampling_params import SamplingParams

# The engine keeps 1 % of the GPU in reserve, 1.4 GiB of an H200, for what the driver takes when a kernel first runs.
_MAX_GROWTH_MIB = 256
_TOO_MANY_SLOTS = 1_000_000_000
_SAME_FRAC = 0.01  # what fits is measured at each start anew
# The way of sampling that takes the most memory: penalties, and a draw.
_PICKY = SamplingParams(1, temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.1, ignore_eos=True)


def fill_memory(preset: Path) -> bool:
    """Fill the GPU with a model of random weights; whether nothing failed and the memory stayed what it was."""
    # Each request is to hold slots of its own.
    config = ServerConfig(model_dir=str(preset), load_format="dummy", disable_prefix_cache=True)
    fits = slots_that_fit(dataclasses.replace(config, max_total_token_num=_TOO_MANY_SLOTS))
    print(f"--max_total_token_num {_TOO_MANY_SLOTS} is refused: at most {fits}")
    with open_engine(config) as host:
        print(f"{host.num_slots} slots: {host.note}")
        before = used_mib()
        run_largest_steps(host)
        after_steps = used_mib()
        used_slots = fill_pool(host)
        after = used_mib()
    print(f"{used_slots} of {host.num_slots} slots were in use at once")
    print(f"memory in use: {before} MiB when ready, {after_steps} after the largest steps, {after} after the brim")
    is_same = abs(fits - host.num_slots) <= _SAME_FRAC * host.num_slots
    return is_same and used_slots == host.num_slots and after - before <= _MAX_GROWTH_MIB


def slots_that_fit(config: ServerConfig) -> int:
    """Ask for too large a pool, and read in the refusal which would fit.

    Raises:
        EngineError: It was not refused, or without naming the flag and a number.
    """
    try:
        with open_engine(config):
            pass
    except EngineError as refusal:
        found = re.search(r"--max_total_token_num \d+ does not fit: at most (\d+)", str(refusal))
        if found is None:
            raise
        return int(found[1])
    raise EngineError(f"a pool of {config.max_total_token_num} slots was not refused")


def run_largest_steps(host: EngineHost) -> None:
    """Keep most rows decoding, penalised and drawn, while the longest prompts come in."""
    boot = host.boot
    num_rows = boot.config.running_max_req_size
    long_len = min(32_000, boot.max_req_total_len - 4)
    small = [_work(host, 16, 60, _PICKY) for _ in range(num_rows - 24)]
    large = [_work(host, long_len, 4, _PICKY) for _ in range(8)]
    host.run([*small, *large])


def fill_pool(host: EngineHost) -> int:
    """Use every slot at once; return how many were."""
    boot = host.boot
    lengths = brim_lengths(host.num_slots, boot.config.running_max_req_size, boot.chunked_prefill_size)
    works = [_work(host, length.prompt_len, length.output_len, _PICKY) for length in lengths]
    host.run(works)
    if [len(ids) for ids in host.outputs] != [work.output_len for work in works]:
        raise EngineError("an answer is short")
    return host.most_used_slots


@dataclass(frozen=True)
class Lengths:
    """Of one request."""

    prompt_len: int
    output_len: int

    @property
    def num_slots(self) -> int:
        """What it holds at its end: its last token is never written."""
        return self.prompt_len + self.output_len - 1


def brim_lengths(num_slots: int, num_rows: int, chunk: int) -> Sequence[Lengths]:
    """Choose requests that all end in one step, and in that step hold every slot between them.

    All prompts are of one length, and whole ones fill a chunk; requests of a later step have the shorter answers. The
    last one's prompt, alone in its step, takes what is left over.

    Args:
        num_slots: Of the pool.
        num_rows: Most requests.
        chunk: Prompt tokens of one step.

    Raises:
        ValueError: The pool is too small for so many requests.
    """
    per_step = 2
    while per_step <= chunk:
        num_reqs = (num_rows - 1) // per_step * per_step + 1
        prompt_len, last_step = chunk // per_step, num_reqs // per_step
        steps_left = [last_step - i // per_step for i in range(num_reqs)]
        more, rest = divmod(num_slots - num_reqs * prompt_len - sum(steps_left), num_reqs)
        if prompt_len * per_step == chunk and more >= 0 and prompt_len + rest <= chunk:
            lengths = [Lengths(prompt_len, 1 + more + left) for left in steps_left]
            return [*lengths[:-1], Lengths(prompt_len + rest, lengths[-1].output_len)]
        per_step += 1
    raise ValueError(f"{num_slots} slots are too few for {num_rows} requests")


def _work(host: EngineHost, prompt_len: int, output_len: int, sampling: SamplingParams) -> Work:
    prompt_ids = draw_ids(np.random.default_rng(prompt_len), host.boot.model.vocab_size, prompt_len)
    return Work(prompt_ids.tolist(), output_len, sampling)
