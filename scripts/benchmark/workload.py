"""What will be sent: the prompts, their bodies and their times."""

from collections import Counter
from dataclasses import dataclass
from itertools import cycle, islice

import msgspec
import numpy as np

from benchmark.api import API_FAMILIES, Sampling
from benchmark.endpoint import ServerError, ServerQueries
from benchmark.options import Options
from benchmark.prompt import Prompt
from benchmark.sharegpt import LengthFilter, load_sharegpt
from benchmark.tokens import FileTokens, ServerTokens, TokenCounter
from benchmark.traces import RandomIds, TraceRow, read_trace

_SHAREGPT_PROMPTS = 1000


class WorkloadError(Exception):
    """The options and the dataset leave nothing that could be sent."""


@dataclass(frozen=True)
class Workload:
    """What will be sent.

    Attributes:
        prompts: At least one.
        warmups: To send before, not measured; other prompts than those, which a prefix cache would otherwise hold.
        offsets_s: When to send each, in seconds after the start.
        skipped: Conversations that were left out, by reason.
        warnings: What the user should know about the prompts.
    """

    prompts: list[Prompt]
    warmups: list[Prompt]
    offsets_s: list[float]
    skipped: Counter[str]
    warnings: list[str]


def make_workload(options: Options, queries: ServerQueries, model: str) -> Workload:
    """Make the prompts and their times.

    Raises:
        WorkloadError: No prompt is left, or the options do not go together.
        ServerError: The server does not say what must be known.
        OSError: The dataset cannot be read.
        ValueError: The dataset is malformed.
    """
    skipped: Counter[str] = Counter()
    if options.dataset is not None and options.dataset.suffix == ".json":
        wanted = options.num_prompts or _SHAREGPT_PROMPTS
        found, skipped = _sharegpt_prompts(options, wanted + options.num_warmups, queries, model)
        prompts, warmups = found[:wanted], found[wanted:]
        if options.repeat and prompts:
            prompts = list(islice(cycle(prompts), wanted))
    else:
        prompts, warmups = _random_prompts(options, queries)
        wanted = options.num_prompts or len(prompts)
    if not prompts:
        raise WorkloadError(f"{options.dataset} leaves no prompt{_reasons(skipped)}")
    warnings = []
    if len(prompts) < wanted:
        warnings.append(
            f"{len(prompts)} prompts of the {wanted} asked for{_reasons(skipped)}; --repeat goes round again"
        )
    if len(warmups) < options.num_warmups:
        warnings.append(f"{len(warmups)} prompts to warm up with of the {options.num_warmups} asked for")
    return Workload(prompts, warmups, arrival_offsets(prompts, options), skipped, warnings)


def write_bodies(prompts: list[Prompt], options: Options, model: str) -> list[bytes]:
    """Write the JSON body of each prompt."""
    family = API_FAMILIES[options.api]
    sampling = Sampling(options.temperature, options.ignore_eos)
    return [msgspec.json.encode(family.write_body(p, sampling, model) | options.extra_body) for p in prompts]


def arrival_offsets(prompts: list[Prompt], options: Options) -> list[float]:
    """Choose when each prompt is sent, in seconds after the start.

    Raises:
        WorkloadError: Timestamps are to be replayed and the dataset has none.
    """
    if options.replay_timestamps:
        stamps = [p.timestamp_s for p in prompts if p.timestamp_s is not None]
        if len(stamps) < len(prompts):
            raise WorkloadError("--replay_timestamps: the dataset has no timestamps")
        return [stamp / options.replay_speed for stamp in stamps]
    if options.request_rate == float("inf"):
        return [0.0] * len(prompts)
    gaps = np.random.default_rng(options.seed).exponential(1.0 / options.request_rate, len(prompts))
    return [float(offset) for offset in np.cumsum(gaps)]


def _sharegpt_prompts(
    options: Options, num_prompts: int, queries: ServerQueries, model: str
) -> tuple[list[Prompt], Counter[str]]:
    if options.dataset is None:
        raise WorkloadError("--dataset is missing")
    counter: TokenCounter = ServerTokens(queries, model)
    if options.tokenizer is not None:
        counter = FileTokens(options.tokenizer)
    lengths = LengthFilter(options.max_prompt_len, options.max_total_len, options.output_len)
    return load_sharegpt(options.dataset, num_prompts, options.seed, lengths, counter)


def _random_prompts(options: Options, queries: ServerQueries) -> tuple[list[Prompt], list[Prompt]]:
    if not API_FAMILIES[options.api].takes_ids:
        raise WorkloadError(f"--api {options.api} takes text alone: token ids need lightserve or openai-completions")
    rows = _rows(options)
    if options.repeat and rows:
        rows = list(islice(cycle(rows), options.num_prompts or len(rows)))
    ids = RandomIds(_vocab_size(options, queries), options.seed)
    prompts = ids.prompts(rows)
    warmups = [TraceRow(row.prompt_len, row.output_len) for row in islice(cycle(rows), options.num_warmups)]
    return prompts, ids.prompts(warmups)


def _rows(options: Options) -> list[TraceRow]:
    if options.dataset is None:
        return [TraceRow(options.prompt_len or 1, options.output_len or 1)] * (options.num_prompts or 1)
    rows = read_trace(options.dataset, options.num_prompts)
    if options.output_len is None:
        return rows
    return [TraceRow(row.prompt_len, options.output_len, row.timestamp_s, row.block_ids) for row in rows]


def _vocab_size(options: Options, queries: ServerQueries) -> int:
    if options.vocab_size is not None:
        return options.vocab_size
    if options.tokenizer is not None:
        return FileTokens(options.tokenizer).vocab_size
    try:
        size = queries.get("/get_server_info").get("vocab_size")
    except (ServerError, AttributeError) as error:
        raise ServerError(f"the server does not say its vocabulary's size: give --vocab_size ({error})") from error
    if not isinstance(size, int):
        raise ServerError("the server does not say its vocabulary's size: give --vocab_size")
    return size


def _reasons(skipped: Counter[str]) -> str:
    return "".join(f"; {count} skipped: {reason}" for reason, count in skipped.most_common())
