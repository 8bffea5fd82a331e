"""What has to be known before the first process starts: the model, its tokenizer, the device, every default."""

from pathlib import Path

from lightserve.boot import Boot
from lightserve.config import ServerConfig
from lightserve.default_model import DEFAULT_MODEL_NAME, fetch_default_model
from lightserve.device import resolve_device
from lightserve.dummy_tokenizer import write_dummy_tokenizer
from lightserve.errors import ConfigError
from lightserve.gguf_tokenizer import export_gguf_tokenizer
from lightserve.model_config import ModelConfig, load_model_config

_PREFILL_TOKENS_PER_STEP = {"cuda": 8192, "cpu": 512}


def prepare(config: ServerConfig, run_dir: Path, listen_fd: int) -> Boot:
    """Find the model, read its facts and resolve every default; fetches the default model if it has to.

    Raises:
        ConfigError: The settings do not fit the machine or the model; names the flag or the file.
    """
    device = resolve_device(config.device, config.tp)
    model_path, model_name = _find_model(config)
    model = load_model_config(model_path, config.load_format)
    chunked_prefill_size = config.chunked_prefill_size or _PREFILL_TOKENS_PER_STEP[device]
    return Boot(
        config=config,
        model=model,
        run_dir=str(run_dir),
        tokenizer_dir=str(_find_tokenizer(config, model, run_dir)),
        served_model_name=config.served_model_name or model_name,
        listen_fd=listen_fd,
        device=device,
        max_req_total_len=_max_req_total_len(config, model),
        chunked_prefill_size=chunked_prefill_size,
        batch_max_tokens=config.batch_max_tokens or chunked_prefill_size + config.running_max_req_size,
    )


def _find_model(config: ServerConfig) -> tuple[Path, str]:
    """Path and name of the model."""
    if config.model_dir is None:
        return fetch_default_model(), DEFAULT_MODEL_NAME
    path = Path(config.model_dir).expanduser()
    if not path.exists():
        raise ConfigError(f"--model_dir {config.model_dir}: no such file or folder")
    resolved = path.resolve()
    return path, resolved.name if resolved.is_dir() else resolved.stem


def _find_tokenizer(config: ServerConfig, model: ModelConfig, run_dir: Path) -> Path:
    """Folder with the tokenizer; one that exists in no folder yet is written to the run directory."""
    source = Path(model.weights_path) if config.tokenizer is None else Path(config.tokenizer).expanduser()
    if not source.exists():
        raise ConfigError(f"--tokenizer {config.tokenizer}: no such file or folder")
    if source.suffix == ".gguf":
        export_gguf_tokenizer(source, _made(run_dir / "tokenizer"))
        return run_dir / "tokenizer"
    folder = source if source.is_dir() else source.parent
    if (folder / "tokenizer.json").exists():
        return folder
    if config.tokenizer is not None:
        raise ConfigError(f"--tokenizer {config.tokenizer}: {folder} has no tokenizer.json")
    if config.load_format != "dummy":
        raise ConfigError(
            f"--model_dir {config.model_dir}: the folder has no tokenizer.json; for a shape without weights add "
            "--load_format dummy, else name a tokenizer with --tokenizer"
        )
    write_dummy_tokenizer(model, _made(run_dir / "tokenizer"))
    return run_dir / "tokenizer"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _max_req_total_len(config: ServerConfig, model: ModelConfig) -> int:
    asked = config.max_req_total_len
    if asked is None:
        return model.max_position
    if asked > model.max_position:
        raise ConfigError(f"--max_req_total_len {asked} exceeds the model's context of {model.max_position} tokens")
    return asked
