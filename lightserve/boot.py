"""What the launcher found out before it started the children, written once to the run directory for all of them."""

from pathlib import Path

import msgspec

from lightserve.config import ServerConfig
from lightserve.device import Device
from lightserve.model_config import ModelConfig


class Boot(msgspec.Struct, frozen=True):
    """Settings, and what follows from them on this machine with this model: every default is resolved here.

    Attributes:
        config: The operator's settings as given.
        model: Facts of the model.
        run_dir: Directory of sockets, mode 0700, short enough for a socket path.
        tokenizer_dir: Folder with tokenizer.json.
        served_model_name: The model's id in the OpenAI API.
        listen_fd: The bound HTTP socket, inherited by HTTP servers.
        device: Where the model runs.
        max_req_total_len: Most tokens of prompt and answer together that the model and the operator allow; the pool may
            turn out smaller (``ServeMsg`` has the least of all).
        chunked_prefill_size: Most prompt tokens of one step.
        batch_max_tokens: Most tokens of one step.
    """

    config: ServerConfig
    model: ModelConfig
    run_dir: str
    tokenizer_dir: str
    served_model_name: str
    listen_fd: int
    device: Device
    max_req_total_len: int
    chunked_prefill_size: int
    batch_max_tokens: int


def write_boot(boot: Boot) -> None:
    """Write ``run_dir/boot``."""
    Path(boot.run_dir, "boot").write_bytes(msgspec.msgpack.encode(boot))


def read_boot(run_dir: str) -> Boot:
    """Read what ``write_boot`` wrote."""
    return msgspec.msgpack.decode(Path(run_dir, "boot").read_bytes(), type=Boot)
