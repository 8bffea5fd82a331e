"""Settings, read once: one frozen dataclass whose fields generate the flags, the defaults, the help and the checks."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from lightserve.errors import ConfigError


def _setting(default: Any, help: str, *, at_least: float | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "at_least": at_least})


@dataclass(frozen=True)
class ServerConfig:
    """Everything an operator can set. What is learnt later (slots that fit, EOS ids) lives elsewhere."""

    model_dir: str | None = _setting(
        None, "Hugging Face model folder or a .gguf file; unset: SmolLM2-135M-Instruct, fetched once"
    )
    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8000, "port to listen on", at_least=0)
    max_total_token_num: int | None = _setting(
        None, "slots of the KV cache, one per token; unset: sized from free memory", at_least=16
    )
    running_max_req_size: int = _setting(1024, "most requests in the running batch", at_least=1)
    max_req_total_len: int | None = _setting(
        None, "most tokens of prompt and answer together; unset: what the model allows", at_least=2
    )
    chunked_prefill_size: int | None = _setting(
        None, "most prompt tokens one step prefills; unset: 8192 on a GPU, 512 on a CPU", at_least=1
    )
    batch_max_tokens: int | None = _setting(
        None, "most tokens of one step, decode rows and prompt chunks together; unset: both limits' sum", at_least=1
    )
    tp: int = _setting(1, "tensor-parallel ranks, one model worker each", at_least=1)
    device: Literal["auto", "cpu", "cuda"] = _setting("auto", "where the model runs")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _setting(
        "auto", "number format of weights and KV cache; auto: the checkpoint's, float32 on CPUs without bf16"
    )
    load_format: Literal["auto", "dummy"] = _setting("auto", "dummy: random weights from the config alone")
    tokenizer: str | None = _setting(None, "tokenizer folder or file; unset: the model's own")
    served_model_name: str | None = _setting(None, "name in the OpenAI API; unset: the model folder's name")
    httpserver_workers: int = _setting(1, "HTTP/tokenizer processes", at_least=1)
    max_queued_reqs: int = _setting(4096, "waiting requests before new ones are answered 429", at_least=1)
    api_key: str | None = _setting(None, "key that clients must send as a bearer token; unset: none")
    drain_timeout_s: float = _setting(30.0, "how long open requests may run on after SIGTERM", at_least=0)
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "least severe level that is logged")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_bound(field, getattr(self, field.name))


def _check_bound(field: "dataclasses.Field[Any]", value: Any) -> None:
    at_least = field.metadata["at_least"]
    if at_least is not None and value is not None and value < at_least:
        raise ConfigError(f"--{field.name} must be at least {at_least}, not {value}")
