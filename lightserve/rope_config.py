"""How positions turn queries and keys: the rotary embedding's facts, resolved from a checkpoint."""

import logging
import math
from typing import Literal, TypeAlias, get_args

import msgspec

from lightserve.fields import MAX_SIZE, Fields

logger = logging.getLogger(__name__)

RopeKind: TypeAlias = Literal["default", "linear", "llama3", "yarn"]

DEFAULT_THETA = 10_000.0  # what both checkpoint formats mean when they do not say


class RopeConfig(msgspec.Struct, frozen=True):
    """The rotary embedding of one model. Fields of other kinds than ``kind`` keep their defaults and mean nothing.

    Attributes:
        theta: Base of the wavelengths: ``inv_freq[j] = theta ** (-2 j / head_dim)``, before scaling.
        kind: How ``inv_freq`` is scaled.
        factor: How many times longer the context became (linear, llama3, yarn).
        original_max_position: Context length before scaling (llama3, yarn).
        low_freq_factor: llama3.
        high_freq_factor: llama3.
        beta_fast: yarn.
        beta_slow: yarn.
        truncate: yarn: the correction range is rounded outwards to whole dimensions.
        attention_factor: yarn: cos and sin are multiplied by it. Already resolved from mscale and factor; 1 otherwise.
        factors: [head_dim / 2]: ``inv_freq`` is divided by these, after ``kind`` (GGUF's rope_freqs.weight).
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] | None = None


def read_rope(config: Fields) -> tuple[RopeConfig, int]:
    """Read the rotary embedding of a config.json, and the longest sequence it allows.

    The parameters stand in ``rope_parameters`` or ``rope_scaling``, their kind under ``rope_type`` or ``type``. A
    linear or yarn factor lengthens the context; llama3 configs already state the longer one.

    Raises:
        ConfigError: An unknown kind, or a parameter that is missing or makes no sense.
    """
    max_position = config.count("max_position_embeddings")
    section = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    params = config.section(section) or Fields(f"{config.source}: {section}", {})
    params.refuse_objects("is per layer, which is not supported")
    _refuse_partial_rotary(config)
    _refuse_partial_rotary(params)
    theta = params.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    kind = params.text("rope_type" if "rope_type" in params else "type", "default")
    match kind:
        case "default":
            return RopeConfig(theta), max_position
        case "linear":
            return _linear(theta, _factor(params, "factor", max_position), max_position)
        case "llama3":
            return _read_llama3(config, params, theta), max_position
        case "yarn":
            return _read_yarn(config, params, theta, max_position)
        case _:
            raise config.refusal(section, f"has the kind {kind!r}; supported: {', '.join(get_args(RopeKind))}")


def _read_llama3(config: Fields, params: Fields, theta: float) -> RopeConfig:
    low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
    if low >= high:
        raise params.refusal("high_freq_factor", f"must be above low_freq_factor ({low}), not {high}")
    original = _original_max_position(config, params, default=None)
    return RopeConfig(
        theta,
        "llama3",
        factor=_factor(params, "factor", original),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(config: Fields, params: Fields, theta: float, max_position: int) -> tuple[RopeConfig, int]:
    original = _original_max_position(config, params, default=max_position)
    factor = _factor(params, "factor", original, max_position / original if original < max_position else None)
    attention_factor = _yarn_attention_factor(factor)
    if "mscale" in params and "mscale_all_dim" in params:
        mscale, mscale_all_dim = params.number("mscale"), params.number("mscale_all_dim")
        attention_factor = _yarn_attention_factor(factor, mscale) / _yarn_attention_factor(factor, mscale_all_dim)
    rope = RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=params.number("beta_fast", 32.0),
        beta_slow=params.number("beta_slow", 1.0),
        truncate=params.flag("truncate", True),
        attention_factor=params.number("attention_factor", attention_factor),
    )
    return rope, int(original * factor)


def _original_max_position(config: Fields, params: Fields, default: int | None) -> int:
    key = "original_max_position_embeddings"
    return config.count(key) if key in config else params.count(key, default)


def _refuse_partial_rotary(fields: Fields) -> None:
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.refusal("partial_rotary_factor", "other than 1 is not supported")


def read_gguf_rope(metadata: Fields, architecture: str, factors: tuple[float, ...] | None) -> tuple[RopeConfig, int]:
    """Read the rotary embedding of a GGUF file's metadata, and the longest sequence it allows.

    Args:
        metadata: The file's metadata.
        architecture: Prefix of its keys.
        factors: [head_dim / 2], from rope_freqs.weight, if the file has it.

    Raises:
        ConfigError: An unknown kind, or a value that makes no sense.
    """
    prefix = f"{architecture}.rope"
    if f"{prefix}.freq_base" not in metadata:
        logger.warning("%s: %s.freq_base is missing; using %g", metadata.source, prefix, DEFAULT_THETA)
    theta = metadata.number(f"{prefix}.freq_base", DEFAULT_THETA)
    max_position = metadata.count(f"{architecture}.context_length")
    factor_key = f"{prefix}.scaling.factor"
    kind = metadata.text(f"{prefix}.scaling.type", "none")
    if f"{prefix}.scale_linear" in metadata:  # as files of 2023 write it
        kind, factor_key = "linear", f"{prefix}.scale_linear"
    match kind:
        case "none":
            rope = RopeConfig(theta)
        case "linear":
            rope, max_position = _linear(theta, _factor(metadata, factor_key, max_position), max_position)
        case "yarn":
            rope, max_position = _read_gguf_yarn(metadata, prefix, theta, max_position)
        case _:
            raise metadata.refusal(f"{prefix}.scaling.type", f"is {kind!r}; supported: none, linear, yarn")
    return msgspec.structs.replace(rope, factors=factors), max_position


def _read_gguf_yarn(metadata: Fields, prefix: str, theta: float, max_position: int) -> tuple[RopeConfig, int]:
    original = metadata.count(f"{prefix}.scaling.original_context_length", max_position)
    factor = _factor(metadata, f"{prefix}.scaling.factor", original)
    rope = RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=metadata.number(f"{prefix}.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.number(f"{prefix}.scaling.yarn_beta_slow", 1.0),
        attention_factor=metadata.number(f"{prefix}.scaling.attn_factor", 1.0) * _yarn_attention_factor(factor),
    )
    return rope, int(original * factor)


def _linear(theta: float, factor: float, max_position: int) -> tuple[RopeConfig, int]:
    return RopeConfig(theta, "linear", factor=factor), int(max_position * factor)


def _yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    # arXiv 2309.00071, section 3.4
    return 0.1 * mscale * math.log(factor) + 1.0


def _factor(fields: Fields, key: str, length: int, default: float | None = None) -> float:
    factor = fields.number(key, default)
    if not 1 <= factor <= MAX_SIZE / length:
        raise fields.refusal(key, f"must be at least 1 and stretch {length} positions sensibly, not {factor}")
    return factor
