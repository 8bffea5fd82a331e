"""How positions turn queries and keys: the rotary embedding's facts, resolved from a checkpoint."""

from typing import Literal, TypeAlias

import msgspec

RopeKind: TypeAlias = Literal["default", "linear", "llama3", "yarn"]


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
