"""The benchmark's flags."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from script_tools.flags import (
    fraction,
    non_negative_float,
    non_negative_int,
    output_file,
    positive_float,
    positive_int,
    rate,
)

from benchmark.api import API_FAMILIES
from benchmark.metrics import LatencyLimits
from lightserve.config import underscored


@dataclass(frozen=True)
class Options:
    """What the user asked for; see the help of the flags."""

    base_url: str
    api: str
    model: str | None
    api_key: str | None
    dataset: Path | None
    tokenizer: Path | None
    vocab_size: int | None
    num_prompts: int | None
    repeat: bool
    prompt_len: int | None
    output_len: int | None
    max_prompt_len: int
    max_total_len: int
    seed: int
    request_rate: float
    replay_timestamps: bool
    replay_speed: float
    max_concurrency: int | None
    num_warmups: int
    ignore_eos: bool
    temperature: float
    extra_body: dict[str, Any]
    timeout_s: float | None
    client_processes: int | None
    ttft_limit_ms: float | None
    tpot_limit_ms: float | None
    e2e_limit_ms: float | None
    max_failed_frac: float
    json: Path | None

    @property
    def limits(self) -> LatencyLimits:
        """Limits of the goodput."""
        return LatencyLimits(self.ttft_limit_ms, self.tpot_limit_ms, self.e2e_limit_ms)


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the command line; flags may be written with ``_`` or ``-``. Exits with a message when one is wrong."""
    parser = _make_parser()
    options = Options(**vars(parser.parse_args(underscored(arguments))))
    if options.dataset is None and (options.prompt_len is None or options.output_len is None):
        parser.error("give --dataset, or --prompt_len and --output_len")
    if options.dataset is not None and options.prompt_len is not None:
        parser.error("--prompt_len is for runs without --dataset")
    if options.replay_timestamps and options.request_rate != float("inf"):
        parser.error("--replay_timestamps and --request_rate exclude each other")
    return options


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Load a server with streamed requests over HTTP and measure what comes back.",
        allow_abbrev=False,
    )
    _add_server_flags(parser.add_argument_group("server"))
    _add_prompt_flags(parser.add_argument_group("prompts"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_report_flags(parser.add_argument_group("report"))
    return parser


def _add_server_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--base_url", default="http://127.0.0.1:8000", help="the server (%(default)s)")
    group.add_argument("--api", choices=sorted(API_FAMILIES), default="lightserve", help="API family (%(default)s)")
    group.add_argument("--model", help="model name; unset: the first of /v1/models")
    group.add_argument("--api_key", help="sent as a bearer token")


def _add_prompt_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--dataset", type=Path, help="ShareGPT conversations (.json) or a length trace (.csv, .jsonl: random token ids)"
    )
    group.add_argument("--prompt_len", type=positive_int, help="without --dataset: tokens of every prompt")
    group.add_argument("--output_len", type=positive_int, help="tokens to ask for; unset: as in the dataset")
    group.add_argument("--num_prompts", type=positive_int, help="unset: 1000 of ShareGPT, all of a trace")
    group.add_argument("--repeat", action="store_true", help="go round again when the dataset has too few prompts")
    group.add_argument(
        "--seed", type=non_negative_int, default=0, help="of the sample, the random ids and the arrivals (%(default)s)"
    )
    group.add_argument(
        "--tokenizer", type=Path, help="tokenizer folder that counts ShareGPT's tokens; unset: the server's /tokenize"
    )
    group.add_argument(
        "--vocab_size", type=positive_int, help="of the random ids; unset: the tokenizer's, else the server's"
    )
    group.add_argument(
        "--max_prompt_len", type=positive_int, default=1024, help="ShareGPT: skips longer prompts (%(default)s)"
    )
    group.add_argument(
        "--max_total_len", type=positive_int, default=2048, help="ShareGPT: skips longer conversations (%(default)s)"
    )


def _add_load_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--request_rate",
        type=rate,
        default=float("inf"),
        help="Poisson arrivals per second (%(default)s: all at once)",
    )
    group.add_argument("--replay_timestamps", action="store_true", help="send when the trace says")
    group.add_argument(
        "--replay_speed", type=positive_float, default=1.0, help="times as fast as the trace (%(default)s)"
    )
    group.add_argument("--max_concurrency", type=positive_int, help="most requests in flight; unset: no limit")
    group.add_argument(
        "--num_warmups",
        type=non_negative_int,
        default=0,
        help="other prompts, sent before and not measured (%(default)s)",
    )
    group.add_argument(
        "--no_ignore_eos",
        dest="ignore_eos",
        action="store_false",
        help="let the model end its answers; unset: they are of exactly the length asked for",
    )
    group.add_argument("--temperature", type=non_negative_float, default=0.0, help="0: greedy (%(default)s)")
    group.add_argument("--extra_body", type=_json_object, default={}, help="JSON object merged into every body")
    group.add_argument(
        "--timeout_s", type=positive_float, help="a request that takes longer has failed; unset: no limit"
    )
    group.add_argument(
        "--client_processes",
        type=_processes,
        default="auto",
        metavar="auto|N",
        help="processes that send the load; auto: by the streams in flight, at most half the cores (%(default)s)",
    )


def _add_report_flags(group: "argparse._ArgumentGroup") -> None:
    for name, what in (("ttft", "time to first token"), ("tpot", "time per output token"), ("e2e", "whole time")):
        group.add_argument(f"--{name}_limit_ms", type=positive_float, help=f"goodput: longest {what} of a good request")
    group.add_argument(
        "--max_failed_frac", type=fraction, default=0.01, help="exit with 1 when a larger share fails (%(default)s)"
    )
    group.add_argument("--json", type=output_file, help="write everything to this file, too")


def _processes(text: str) -> int | None:
    return None if text == "auto" else positive_int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"not a JSON object: {error}") from error
