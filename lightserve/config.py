"""Settings, read once: one frozen dataclass whose fields generate the flags, the defaults, the help and the checks."""

import argparse
import dataclasses
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightserve.errors import ConfigError


def setting(default: Any, help: str, *, at_least: float | None = None, at_most: float | None = None) -> Any:
    """Declare one field of a settings dataclass: what it is for, and its bounds, both allowed."""
    return dataclasses.field(default=default, metadata={"help": help, "at_least": at_least, "at_most": at_most})


@dataclass(frozen=True)
class ServerConfig:
    """Everything an operator can set. What is learnt later (slots that fit, EOS ids) lives elsewhere.

    Raises:
        ConfigError: A value is out of its bounds; names the flag.
    """

    model_dir: str | None = setting(
        None, "Hugging Face model folder or a .gguf file; unset: SmolLM2-135M-Instruct, fetched once"
    )
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: any free one", at_least=0, at_most=65535)
    max_total_token_num: int | None = setting(
        None, "slots of the KV cache, one per token; unset: sized from free memory", at_least=16
    )
    running_max_req_size: int = setting(1024, "most requests in the running batch", at_least=1)
    max_req_total_len: int | None = setting(
        None, "most tokens of prompt and answer together; unset: what the model allows", at_least=2
    )
    chunked_prefill_size: int | None = setting(
        None, "most prompt tokens one step prefills; unset: 8192 on a GPU, 512 on a CPU", at_least=1
    )
    batch_max_tokens: int | None = setting(
        None,
        "most tokens of one step, decode rows and prompt chunks together; unset: room for both at their most",
        at_least=2,
    )
    tp: int = setting(1, "tensor-parallel ranks, one model worker each", at_least=1)
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where the model runs; auto: cuda if there is a GPU")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto", "number format of weights and KV cache; auto: the checkpoint's, float32 on CPUs without bf16"
    )
    load_format: Literal["auto", "dummy"] = setting("auto", "dummy: random weights from the config alone")
    tokenizer: str | None = setting(None, "tokenizer folder or file; unset: the model's own")
    served_model_name: str | None = setting(None, "name in the OpenAI API; unset: the model folder's name")
    httpserver_workers: int = setting(1, "HTTP/tokenizer processes", at_least=1, at_most=1000)
    max_queued_reqs: int = setting(4096, "waiting requests before new ones are answered 429", at_least=1)
    router_policy: Literal["conservative", "past_future"] = setting(
        "conservative",
        "how long answers are expected to be. conservative: as long as max_new_tokens, so that none is ever paused; "
        "past_future: as long as those of late, and some are paused when they turn out longer",
    )
    max_overflow_prob: float = setting(
        0.02, "past_future: chance of an overflow that admitting a request may leave", at_least=1e-9, at_most=0.5
    )
    max_itl_ms: float = setting(
        0.0, "milliseconds between tokens that the prompts of others should not exceed; 0: no target", at_least=0
    )
    disable_prefix_cache: bool = setting(False, "prompts that begin alike share nothing")
    api_key: str | None = setting(None, "key that clients must send as a bearer token; unset: none")
    drain_timeout_s: float = setting(30.0, "seconds that open requests may run on after SIGTERM", at_least=0)
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least severe level that is logged")

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.batch_max_tokens is not None and self.batch_max_tokens <= self.running_max_req_size:
            raise ConfigError(
                f"--batch_max_tokens {self.batch_max_tokens} must exceed --running_max_req_size "
                f"{self.running_max_req_size}: each running request takes one token of a step, prompts take the rest"
            )


def check_bounds(settings: Any) -> None:
    """Check every field of a settings dataclass against its declared bounds.

    Raises:
        ConfigError: Names the flag, the bound and the value.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        at_least, at_most = field.metadata["at_least"], field.metadata["at_most"]
        if value == "":
            raise ConfigError(f"--{field.name} must not be empty")
        # Written so that NaN, which compares false with everything, is refused.
        if value is not None and at_least is not None and not value >= at_least:
            raise ConfigError(f"--{field.name} must be at least {at_least}, not {value}")
        if value is not None and at_most is not None and not value <= at_most:
            raise ConfigError(f"--{field.name} must be at most {at_most}, not {value}")


def add_flags(parser: argparse.ArgumentParser, settings_type: type) -> None:
    """Add one flag for each field of a settings dataclass.

    ``bool`` fields, which must be False by default, become switches; ``Literal`` fields offer their choices; for
    ``X | None`` the unset flag means None.
    """
    hints = get_type_hints(settings_type)
    for field in dataclasses.fields(settings_type):
        parser.add_argument(f"--{field.name}", default=field.default, **_flag_options(field, hints[field.name]))


def underscored(arguments: Sequence[str]) -> list[str]:
    """Spell flags with underscores: ``--max-total-token-num=5`` becomes ``--max_total_token_num=5``.

    What follows a bare ``--`` is left alone, and so are values.
    """
    return [_underscored_flag(argument) if argument.startswith("--") else argument for argument in arguments]


def _underscored_flag(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value


def _flag_options(field: "dataclasses.Field[Any]", hint: Any) -> dict[str, Any]:
    help = field.metadata["help"].replace("%", "%%")
    if hint is bool:
        return {"help": help, "action": "store_true"}
    if field.default is not None:
        help = f"{help} (default: {field.default})"
    if get_origin(hint) is Literal:
        return {"help": help, "choices": get_args(hint)}
    return {"help": help, "type": _without_none(hint), "metavar": _without_none(hint).__name__.upper()}


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return next(member for member in get_args(hint) if member is not type(None))
    return hint
