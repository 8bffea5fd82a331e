"""Bring one rank's weights to its device."""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from lightserve.errors import ConfigError
from lightserve.model_config import ModelConfig
from lightserve.model_worker.host import free_host_bytes
from lightserve.model_worker.kv_cache import GIB
from lightserve.model_worker.weights.dummy import fill_dummy
from lightserve.model_worker.weights.gguf_file import GgufFile
from lightserve.model_worker.weights.layout import Piece, allocate, pieces_of
from lightserve.model_worker.weights.model_weights import ModelWeights
from lightserve.model_worker.weights.progress import Progress
from lightserve.model_worker.weights.safetensors_files import SafetensorsFiles
from lightserve.model_worker.weights.sharding import Shard
from lightserve.model_worker.weights.tensor_source import TensorSource
from lightserve.model_worker.weights.transfer import transfer

logger = logging.getLogger(__name__)

_BLOCK_ELEMENTS = 1 << 22  # 8 MiB of bfloat16: long enough for the bus, short enough to keep every thread busy
_LAYER_PREFIXES = ("model.layers.", "blk.")
_KNOWN_UNUSED = ("lm_head.weight", "rope_freqs.weight")  # a tied head saved twice; read with the configuration
_SHOWN_NAMES = 5


def load_weights(
    config: ModelConfig, shard: Shard, *, device: torch.device, dtype: torch.dtype, load_format: str
) -> ModelWeights:
    """Load, or with ``load_format`` dummy invent, one rank's shard of the weights.

    Every name and shape is checked before the first number is read. Each number is copied once, to its place in the
    fused tensors.

    Raises:
        ConfigError: The model does not fit the device, or its files are missing, damaged or not those of this model.
    """
    needed = list(pieces_of(_allocate(config, shard, torch.device("meta"), dtype), config, shard))
    source = None if load_format == "dummy" else _open(config)
    if source is not None:
        _check(source, needed)
    if device.type == "cpu":
        _check_memory(config, sum(piece.target.nbytes for piece in needed))
    weights = _allocate(config, shard, device, dtype)
    if source is None:
        fill_dummy(weights, config, shard)
    else:
        _fill(source, weights, config, shard, device)
    return weights


def _open(config: ModelConfig) -> TensorSource:
    path = Path(config.weights_path)
    return SafetensorsFiles(path) if path.is_dir() else GgufFile(config)


def _allocate(config: ModelConfig, shard: Shard, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    try:
        return allocate(config, shard, device, dtype)
    except RuntimeError as error:  # what torch raises where sizes overflow; a subclass of it where a GPU is full
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--model_dir {config.weights_path}: its weights do not fit ({reason})") from error


def _check_memory(config: ModelConfig, num_bytes: int) -> None:
    free_bytes = free_host_bytes()
    if num_bytes > free_bytes:
        raise ConfigError(
            f"--model_dir {config.weights_path}: its weights take {num_bytes / GIB:.1f} GiB, and "
            f"{free_bytes / GIB:.1f} GiB of memory are free"
        )


def _fill(source: TensorSource, weights: ModelWeights, config: ModelConfig, shard: Shard, device: torch.device) -> None:
    pieces = [
        block
        for piece in pieces_of(weights, config, shard)
        for block in piece.split(_BLOCK_ELEMENTS, multiple=config.head_dim)
    ]
    progress = Progress(sum(piece.target.nbytes for piece in pieces), shown=shard.rank == 0)
    transfer(source, pieces, device, progress.add)
    progress.finish()


def _check(source: TensorSource, pieces: Sequence[Piece]) -> None:
    missing = [piece.name for piece in pieces if piece.name not in source.names]
    if missing:
        hint = "; is tie_word_embeddings missing from its configuration?" if missing == ["lm_head.weight"] else ""
        raise ConfigError(f"{source.origin}: tensors are missing: {_listed(missing)}{hint}")
    for piece in pieces:
        shape = source.shape(piece.name)
        if shape != piece.shape:
            raise ConfigError(
                f"{source.origin}: tensor {piece.name} has shape {list(shape)}; its configuration says "
                f"{list(piece.shape)}"
            )
    _check_unused(source, {piece.name for piece in pieces})


def _check_unused(source: TensorSource, used: Collection[str]) -> None:
    """Refuse what a layer would miss, such as a bias; warn of the rest."""
    unused = [
        name
        for name in sorted(source.names)
        if name not in used and name not in _KNOWN_UNUSED and not name.endswith("rotary_emb.inv_freq")
    ]
    in_layers = [name for name in unused if name.startswith(_LAYER_PREFIXES)]
    if in_layers:
        raise ConfigError(
            f"{source.origin}: its layers hold tensors that this model has no use for: {_listed(in_layers)}"
        )
    if unused:
        logger.warning("%s: not used: %s", source.origin, _listed(unused))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
