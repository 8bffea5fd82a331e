"""What every process must know of a model: its shape, its limits, the ids that end a text."""

import logging
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec
import numpy as np
from gguf.constants import GGMLQuantizationType
from safetensors import SafetensorError, safe_open

from lightserve.end_ids import folder_end_ids, gguf_end_ids
from lightserve.errors import ConfigError
from lightserve.fields import Fields
from lightserve.gguf_header import GgufHeader, GgufTensor
from lightserve.rope_config import RopeConfig, read_gguf_rope, read_rope
from lightserve.safetensors_index import weight_files

logger = logging.getLogger(__name__)

Architecture: TypeAlias = Literal["llama", "mistral", "qwen2", "qwen3"]
DtypeName: TypeAlias = Literal["bfloat16", "float16", "float32"]

_MAX_LAYERS = 10_000  # more is damage, and would be allocated one by one
_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_GGUF_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_DTYPES: dict[str, DtypeName] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # as safetensors writes them
_GGUF_DTYPES: dict[GGMLQuantizationType, DtypeName] = {
    GGMLQuantizationType.BF16: "bfloat16",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.F32: "float32",
}


class ModelConfig(msgspec.Struct, frozen=True):
    """One model's facts, from its folder or .gguf file, checked.

    Attributes:
        architecture: The family whose formulas it follows.
        weights_path: The folder or the .gguf file.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the feed-forward layer.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; divides ``num_heads``.
        head_dim: Even; not always ``hidden_size / num_heads``.
        vocab_size: Rows of the embedding table; may exceed the ids that have text.
        rms_norm_eps: Of every norm.
        rope: The rotary embedding.
        max_position: Longest sequence, after RoPE scaling.
        tie_embeddings: The output head is the embedding table.
        qkv_bias: The qkv projections add a bias.
        qk_norm: Queries and keys are normalised per head before RoPE.
        dtype: The checkpoint's number format; bfloat16 for quantised files.
        eos_token_ids: Every id that ends a text, ascending; may be empty.
        bos_token_id: The id that begins a text, if the model has one.
    """

    architecture: Architecture
    weights_path: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: DtypeName
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def load_model_config(path: Path, load_format: str = "auto") -> ModelConfig:
    """Read a model's facts.

    Args:
        path: A Hugging Face folder, or a .gguf file.
        load_format: With ``dummy`` a folder needs no weights, only its config.json.

    Raises:
        ConfigError: Not a model, damaged, or one that lightserve cannot run; names the file and the key.
    """
    if path.is_dir():
        return _read_folder(path, load_format)
    if path.is_file() and path.suffix == ".gguf":
        return _read_gguf(GgufHeader.read(path))
    if path.exists():
        raise ConfigError(f"--model_dir {path}: neither a model folder nor a .gguf file")
    raise ConfigError(f"--model_dir {path}: no such folder or file")


def _read_folder(folder: Path, load_format: str) -> ModelConfig:
    path = folder / "config.json"
    if not path.is_file() and any(folder.glob("*.gguf")):
        raise ConfigError(f"--model_dir {folder}: has no config.json; give the path of its .gguf file itself")
    config = Fields.from_json(path)
    architecture = _architecture(config)
    _refuse_variants(config, architecture)
    rope, max_position = read_rope(config)
    vocab_size = config.count("vocab_size")
    num_heads = config.count("num_attention_heads")
    return _checked(
        config.source,
        ModelConfig(
            architecture=architecture,
            weights_path=str(folder),
            hidden_size=config.count("hidden_size"),
            intermediate_size=config.count("intermediate_size"),
            num_layers=config.count("num_hidden_layers", at_most=_MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=config.count("num_key_value_heads", num_heads),
            head_dim=_head_dim(config, num_heads),
            vocab_size=vocab_size,
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            rope=rope,
            max_position=_within_window(config, architecture, max_position),
            tie_embeddings=config.flag("tie_word_embeddings", False),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            dtype=_dtype(folder, config, load_format),
            eos_token_ids=folder_end_ids(folder, config, vocab_size),
            bos_token_id=_bos(config, "bos_token_id", vocab_size),
        ),
    )


def _architecture(config: Fields) -> Architecture:
    names = config.raw("architectures")
    if isinstance(names, list) and names:
        key, name, known = "architectures", str(names[0]), _ARCHITECTURES
    else:
        key, name, known = "model_type", config.text("model_type"), {kind: kind for kind in get_args(Architecture)}
    if name not in known:
        raise config.refusal(key, f"{name!r} is not supported; supported: {', '.join(known)}")
    return known[name]


def _refuse_variants(config: Fields, architecture: Architecture) -> None:
    """Refuse what would run and answer wrongly."""
    if config.text("hidden_act", "silu") != "silu":
        raise config.refusal("hidden_act", f"{config.text('hidden_act')!r} is not supported; supported: silu")
    if "quantization_config" in config:
        raise config.refusal("quantization_config", "is set; quantised checkpoints are supported as GGUF only")
    for key in ("attention_bias", "mlp_bias"):
        # Qwen2's biases, on q, k and v alone, are part of its architecture and not told by this key.
        if config.flag(key, False) and architecture != "qwen2":
            raise config.refusal(key, "is not supported")


def _head_dim(config: Fields, num_heads: int) -> int:
    if "head_dim" in config:
        return config.count("head_dim")
    hidden_size = config.count("hidden_size")
    if hidden_size % num_heads:
        raise config.refusal("hidden_size", f"{hidden_size} is no multiple of num_attention_heads {num_heads}")
    return hidden_size // num_heads


def _within_window(config: Fields, architecture: Architecture, max_position: int) -> int:
    """Shorten the context to the sliding window, where one is in use: within it, sliding and full attention agree."""
    if "sliding_window" not in config or not config.flag("use_sliding_window", architecture == "mistral"):
        return max_position
    window = config.count("sliding_window")
    if window < max_position:
        logger.warning("%s: sliding_window limits sequences to %d tokens, not %d", config.source, window, max_position)
    return min(window, max_position)


def _dtype(folder: Path, config: Fields, load_format: str) -> DtypeName:
    key = "dtype" if "dtype" in config else "torch_dtype"
    if key in config:
        name = config.text(key).removeprefix("torch.")
        for dtype in _DTYPES.values():
            if name == dtype:
                return dtype
        raise config.refusal(key, f"{name!r} is not supported; supported: {', '.join(_DTYPES.values())}")
    if load_format == "dummy":
        return "bfloat16"
    return _stored_dtype(folder)


def _stored_dtype(folder: Path) -> DtypeName:
    """Look at a stored tensor, for configs that do not say. Damaged files are left for the loader to name."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    return _DTYPES.get(file.get_slice(name).get_dtype(), "bfloat16")
        except (OSError, SafetensorError):
            continue
    return "bfloat16"


def _read_gguf(header: GgufHeader) -> ModelConfig:
    metadata = header.fields
    name = metadata.text("general.architecture")
    if name not in _GGUF_ARCHITECTURES:
        supported = ", ".join(_GGUF_ARCHITECTURES)
        raise metadata.refusal("general.architecture", f"{name!r} is not supported; supported: {supported}")
    architecture = _GGUF_ARCHITECTURES[name]
    if metadata.raw(f"{name}.expert_count") not in (None, 0):
        raise metadata.refusal(f"{name}.expert_count", "says a mixture of experts, which is not supported")
    num_heads = metadata.count(f"{name}.attention.head_count")
    rope, max_position = read_gguf_rope(metadata, name, _rope_factors(header))
    vocab_size = _gguf_tensor(header, "token_embd.weight").shape[0]
    return _checked(
        metadata.source,
        ModelConfig(
            architecture=architecture,
            weights_path=str(header.path),
            hidden_size=metadata.count(f"{name}.embedding_length"),
            intermediate_size=metadata.count(f"{name}.feed_forward_length"),
            num_layers=metadata.count(f"{name}.block_count", at_most=_MAX_LAYERS),
            num_heads=num_heads,
            num_kv_heads=metadata.count(f"{name}.attention.head_count_kv", num_heads),
            head_dim=_gguf_head_dim(metadata, name, num_heads),
            vocab_size=vocab_size,
            rms_norm_eps=metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
            rope=rope,
            max_position=_gguf_within_window(metadata, name, max_position),
            tie_embeddings="output.weight" not in header.tensors,
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            dtype=_GGUF_DTYPES.get(_gguf_tensor(header, "blk.0.attn_q.weight").kind, "bfloat16"),
            eos_token_ids=gguf_end_ids(header, vocab_size),
            bos_token_id=_bos(metadata, "tokenizer.ggml.bos_token_id", vocab_size),
        ),
    )


def _gguf_tensor(header: GgufHeader, name: str) -> GgufTensor:
    if name not in header.tensors:
        raise ConfigError(f"{header.path}: tensor {name} is missing")
    return header.tensors[name]


def _rope_factors(header: GgufHeader) -> tuple[float, ...] | None:
    tensor = header.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.kind != GGMLQuantizationType.F32:
        raise ConfigError(f"{header.path}: tensor {tensor.name} must be F32, not {tensor.kind.name}")
    factors = np.fromfile(header.path, dtype="<f4", count=tensor.num_bytes // 4, offset=tensor.offset)
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise ConfigError(f"{header.path}: tensor {tensor.name} must hold finite numbers above 0")
    return tuple(factors.tolist())


def _gguf_head_dim(metadata: Fields, name: str, num_heads: int) -> int:
    head_dim = metadata.count(f"{name}.attention.key_length", metadata.count(f"{name}.embedding_length") // num_heads)
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        if metadata.count(key, head_dim) != head_dim:
            raise metadata.refusal(key, f"other than the head size {head_dim} is not supported")
    return head_dim


def _gguf_within_window(metadata: Fields, name: str, max_position: int) -> int:
    return min(max_position, metadata.count(f"{name}.attention.sliding_window", max_position))


def _bos(fields: Fields, key: str, vocab_size: int) -> int | None:
    ids = fields.token_ids(key)
    if len(ids) > 1 or any(token_id >= vocab_size for token_id in ids):
        raise fields.refusal(key, f"must be one id below the vocabulary size {vocab_size}")
    return ids[0] if ids else None


def _checked(source: str, config: ModelConfig) -> ModelConfig:
    """Refuse sizes that do not go together."""
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"{source}: {config.num_heads} query heads are no multiple of {config.num_kv_heads} key/value heads"
        )
    if config.head_dim % 2:
        raise ConfigError(f"{source}: head_dim {config.head_dim} is odd; the rotary embedding turns pairs")
    if config.rope.factors is not None and len(config.rope.factors) != config.head_dim // 2:
        raise ConfigError(
            f"{source}: rope_freqs.weight holds {len(config.rope.factors)} factors for head_dim {config.head_dim}"
        )
    return config
