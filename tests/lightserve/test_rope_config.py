import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightserve.errors import ConfigError
from lightserve.fields import Fields
from lightserve.model_worker.layers.rope import inverse_frequencies
from lightserve.rope_config import RopeConfig, read_rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def read(max_position: int = 256, **config: Any) -> tuple[RopeConfig, int]:
    return read_rope(Fields("config.json", {"max_position_embeddings": max_position, **config}))


def reference(rope_parameters: dict[str, Any], max_position: int) -> tuple[torch.Tensor, float]:
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=max_position, rope_parameters=rope_parameters
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[rope_parameters["rope_type"]](config, torch.device("cpu"))
    return inv_freq, attention_factor


@pytest.mark.parametrize(
    ("parameters", "longest"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "llama3", **LLAMA3}, 256),
        ({"rope_type": "yarn", **YARN}, 256),
        ({"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}, 256),
        ({"rope_type": "yarn", **YARN, "attention_factor": 1.5}, 256),
        ({"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, 256),
    ],
)
def test_known_kinds_turn_as_transformers_turns(parameters: dict[str, Any], longest: int) -> None:
    rope, max_position = read(rope_theta=500000.0, rope_scaling=parameters)
    inv_freq, attention_factor = reference({"rope_theta": 500000.0, **parameters}, 256)
    torch.testing.assert_close(inverse_frequencies(rope, 32), inv_freq, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor)
    assert max_position == longest


@pytest.mark.parametrize("kind", ["default", "linear"])
def test_the_factors_of_a_file_divide_what_the_kind_gives(kind: str) -> None:
    plain = RopeConfig(10000.0, kind, factor=2.0)  # type: ignore[arg-type]  # one of the kinds
    factors = (1.0, 2.0, 4.0, 8.0)
    expected = inverse_frequencies(plain, 8) / torch.tensor(factors)
    torch.testing.assert_close(inverse_frequencies(msgspec.structs.replace(plain, factors=factors), 8), expected)


def test_the_kind_and_base_are_read_wherever_they_stand() -> None:
    expected = RopeConfig(500000.0, "linear", factor=2.0)
    for config in (
        {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}},
        {"rope_theta": 1.5, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}},
    ):
        assert read(**config)[0] == expected


@pytest.mark.parametrize("config", [{}, {"rope_scaling": None}, {"rope_scaling": {"rope_type": "default"}}])
def test_without_scaling_and_base_the_format_defaults_hold(config: dict[str, Any]) -> None:
    assert read(**config) == (RopeConfig(10000.0), 256)


@pytest.mark.parametrize("max_position", [64, 256])
def test_yarn_reaches_factor_times_the_original_length(max_position: int) -> None:
    assert read(max_position, rope_scaling={"type": "yarn", **YARN})[1] == 256


def test_yarn_without_an_original_length_stretches_the_stated_one() -> None:
    rope, max_position = read(64, rope_scaling={"type": "yarn", "factor": 4.0})
    assert (rope.original_max_position, max_position) == (64, 256)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"rope_scaling": {"rope_type": "banana"}}, "rope_scaling has the kind 'banana'; supported: default, linear"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "has the kind 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "factor must be at least 1 and stretch 256"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a finite number above 0, not '2'"),
        ({"rope_scaling": {"type": 3}}, "type must be a string"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "high_freq_factor must be above",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_theta": -1.0}, "rope_theta must be a finite number above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor other than 1"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention.*per layer"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
    ],
)
def test_what_is_unknown_or_senseless_is_refused(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: .*{complaint}"):
        read(**config)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"])
def test_the_presets_scale_as_llama3(name: str) -> None:
    path = Path(__file__).parents[2] / "scripts" / "presets" / name / "config.json"
    rope, max_position = read_rope(Fields.from_json(path))
    assert (rope.kind, rope.theta, max_position) == ("llama3", 500000.0, 131072)
    assert rope.factor == json.loads(path.read_text())["rope_scaling"]["factor"]
