import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lightserve.errors import ConfigError
from lightserve.model_config import ModelConfig, load_model_config
from lightserve.rope_config import RopeConfig
from tests.lightserve.gguf_files import ZEROS, write_gguf_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PRESETS = Path(__file__).parents[2] / "scripts" / "presets"


def write_folder(folder: Path, **changes: Any) -> Path:
    values = {key: value for key, value in (CONFIG | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def load(folder: Path, **changes: Any) -> ModelConfig:
    return load_model_config(write_folder(folder, **changes))


def write_json(folder: Path, name: str, values: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(values))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_a_folder_is_read_whole_and_survives_a_message(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config == ModelConfig(
        architecture="llama",
        weights_path=str(tmp_path),
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=100,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        max_position=256,
        tie_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        dtype="bfloat16",
        eos_token_ids=(2,),
        bos_token_id=1,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ModelConfig) == config


@pytest.mark.parametrize(
    ("class_name", "architecture", "qkv_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", "llama", False, False),
        ("MistralForCausalLM", "mistral", False, False),
        ("Qwen2ForCausalLM", "qwen2", True, False),
        ("Qwen3ForCausalLM", "qwen3", False, True),
    ],
)
def test_each_family_has_its_biases_and_norms(
    class_name: str, architecture: str, qkv_bias: bool, qk_norm: bool, tmp_path: Path
) -> None:
    config = load(tmp_path, architectures=[class_name], model_type=architecture)
    assert (config.architecture, config.qkv_bias, config.qk_norm) == (architecture, qkv_bias, qk_norm)
    assert load(tmp_path, architectures=None, model_type=architecture).architecture == architecture


@pytest.mark.parametrize(("given_head_dim", "head_dim"), [(32, 32), (None, 16), ("absent", 16)])
def test_the_head_size_is_what_the_config_says_or_hidden_over_heads(
    given_head_dim: Any, head_dim: int, tmp_path: Path
) -> None:
    assert load(tmp_path, head_dim=given_head_dim).head_dim == head_dim


def test_absent_kv_heads_are_as_many_as_query_heads(tmp_path: Path) -> None:
    assert load(tmp_path, num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "absent", "dtype": "float32"}, "float32"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
    ],
)
def test_the_dtype_is_the_checkpoints(changes: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    assert load(tmp_path, **changes).dtype == dtype


def test_a_dtype_that_the_config_does_not_say_is_that_of_the_files_that_the_index_names(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, dtype=torch.float16)}, tmp_path / "model.safetensors")  # a stray one
    save_file({"a": torch.ones(2)}, tmp_path / "weights-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "weights-1.safetensors"}}')
    assert load(tmp_path, torch_dtype="absent").dtype == "float32"


def test_a_dtype_that_the_config_does_not_say_is_that_of_the_stored_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, dtype=torch.float16)}, tmp_path / "model.safetensors")
    assert load(tmp_path, torch_dtype="absent").dtype == "float16"
    assert load_model_config(tmp_path, "dummy").dtype == "bfloat16"
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert load_model_config(tmp_path).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "max_position"),
    [
        ({"sliding_window": 64}, 64),
        ({"sliding_window": None}, 256),
        ({"sliding_window": 4096}, 256),
        ({"sliding_window": 64, "use_sliding_window": False}, 256),
    ],
)
def test_a_sliding_window_in_use_limits_the_length(
    changes: dict[str, Any], max_position: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load(tmp_path, architectures=["MistralForCausalLM"], **changes)
    assert config.max_position == max_position
    assert len(warnings_in(caplog)) == (max_position == 64)


def test_qwen_uses_its_sliding_window_only_when_it_says_so(tmp_path: Path) -> None:
    assert load(tmp_path, architectures=["Qwen2ForCausalLM"], sliding_window=64).max_position == 256
    config = load(tmp_path, architectures=["Qwen2ForCausalLM"], sliding_window=64, use_sliding_window=True)
    assert config.max_position == 64


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            r"architectures 'MixtralForCausalLM' is not supported; supported: ",
        ),
        ({"architectures": None, "model_type": "gpt2"}, r"model_type 'gpt2' is not supported"),
        ({"architectures": None, "model_type": None}, r"model_type is missing"),
        ({"hidden_size": "absent"}, r"hidden_size is missing"),
        ({"hidden_size": float("nan")}, r"not valid JSON"),
        ({"hidden_size": 64.0}, r"hidden_size must be an integer from 1 to 2147483647, not 64\.0"),
        ({"hidden_size": True}, r"hidden_size must be an integer"),
        ({"hidden_size": "64"}, r"hidden_size must be an integer"),
        ({"hidden_size": 10**30}, r"hidden_size must be an integer|not valid JSON"),
        ({"hidden_size": 66}, r"hidden_size 66 is no multiple of num_attention_heads 4"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers must be an integer"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers must be an integer from 1 to 10000"),
        ({"num_attention_heads": -4}, r"num_attention_heads must be an integer"),
        ({"num_key_value_heads": 3}, r"4 query heads are no multiple of 3"),
        ({"head_dim": 15}, r"head_dim 15 is odd"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps must be a finite number above 0"),
        ({"rms_norm_eps": "1e-5"}, r"rms_norm_eps must be a finite number"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, r"attention_bias is not supported"),
        ({"mlp_bias": True}, r"mlp_bias is not supported"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings must be true or false"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config is set; .* as GGUF only"),
        ({"torch_dtype": "float8_e4m3fn"}, r"torch_dtype 'float8_e4m3fn' is not supported"),
        ({"eos_token_id": "</s>"}, r"eos_token_id must be a token id"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id must be a token id"),
        ({"bos_token_id": 100}, r"bos_token_id must be one id below the vocabulary size 100"),
        ({"rope_scaling": {"rope_type": "banana"}}, r"rope_scaling has the kind 'banana'"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_with_file_and_key(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: .*({complaint})"):
        load(tmp_path, **changes)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1} x', "\udcff", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json: (not valid JSON|must hold a JSON object)"):
        load_model_config(tmp_path)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        load_model_config(tmp_path)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ConfigError, match=r"give the path of its \.gguf file itself"):
        load_model_config(tmp_path)
    (tmp_path / "m.bin").touch()
    with pytest.raises(ConfigError, match=r"neither a model folder nor a \.gguf file"):
        load_model_config(tmp_path / "m.bin")
    with pytest.raises(ConfigError, match="no such folder or file"):
        load_model_config(tmp_path / "nowhere")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
OTHER_KEYS = ["head_dim", "rope_scaling", "rope_parameters", "sliding_window", "dtype", "hidden_act", "mlp_bias"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from([*CONFIG, *OTHER_KEYS]), json_values, min_size=1, max_size=3))
def test_any_json_whatever_is_read_or_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with contextlib.suppress(ConfigError):
        load(tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama-3.2-1b", (16, 2048, 8192, 32, 8, 64, True)),
        ("llama-3.1-8b", (32, 4096, 14336, 32, 8, 128, False)),
        ("llama-3.1-70b", (80, 8192, 28672, 64, 8, 128, False)),
    ],
)
def test_the_presets_have_the_shapes_of_their_names(name: str, shape: tuple[int, ...]) -> None:
    c = load_model_config(PRESETS / name, "dummy")
    sizes = (
        c.num_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_heads,
        c.num_kv_heads,
        c.head_dim,
        c.tie_embeddings,
    )
    assert sizes == shape
    assert (c.vocab_size, c.dtype, c.eos_token_ids) == (128256, "bfloat16", (128001, 128008, 128009))


def test_end_ids_of_all_three_files_are_joined(tmp_path: Path) -> None:
    write_json(tmp_path, "generation_config", {"eos_token_id": [2, 7]})
    write_json(
        tmp_path,
        "tokenizer_config",
        {"eos_token": {"content": "<|end|>"}, "added_tokens_decoder": {"9": {"content": "<|end|>"}}},
    )
    assert load(tmp_path, eos_token_id=5).eos_token_ids == (2, 5, 7, 9)
    assert load(tmp_path, eos_token_id=[5, 2]).eos_token_ids == (2, 5, 7, 9)
    assert load(tmp_path, eos_token_id=None).eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize("eos", [{"eos_token_id": 8}, {"eos_token_id": [8]}, {"eos_token": "</s>"}])
def test_the_tokenizer_config_may_name_its_end_in_each_way(eos: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path, "tokenizer_config", eos)
    write_json(tmp_path, "tokenizer", {"added_tokens": [], "model": {"vocab": {"</s>": 8, "a": 3}}})
    assert load(tmp_path, eos_token_id=None).eos_token_ids == (8,)
    write_json(tmp_path, "tokenizer", {"added_tokens": [{"content": "</s>", "id": 8}], "model": {"vocab": {}}})
    assert load(tmp_path, eos_token_id=None).eos_token_ids == (8,)


def test_an_end_that_no_id_can_bring_is_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_json(tmp_path, "tokenizer_config", {"eos_token": "<|gone|>"})
    assert load(tmp_path, eos_token_id=[2, 100]).eos_token_ids == (2,)
    missing, outside = warnings_in(caplog)
    assert "eos_token '<|gone|>' is not in the vocabulary" in missing
    assert "end ids [100] lie outside the vocabulary of 100" in outside


def test_a_damaged_generation_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json: not valid JSON"):
        load(tmp_path)
    write_json(tmp_path, "generation_config", {"eos_token_id": 1.5})
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id must be a token id"):
        load(tmp_path)


def load_gguf(tmp_path: Path, metadata: dict[str, Any] | None = None, tensors: Any = None) -> ModelConfig:
    return load_model_config(write_gguf_file(tmp_path / "m.gguf", metadata, tensors))


def test_a_gguf_file_is_read_whole(tmp_path: Path) -> None:
    config = load_gguf(tmp_path, {"tokenizer.ggml.bos_token_id": 1})
    assert config == ModelConfig(
        architecture="llama",
        weights_path=str(tmp_path / "m.gguf"),
        hidden_size=64,
        intermediate_size=96,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=8,
        rms_norm_eps=float(np.float32(1e-5)),
        rope=RopeConfig(1e6),
        max_position=256,
        tie_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        dtype="float32",
        eos_token_ids=(),
        bos_token_id=1,
    )


def test_output_weight_unties_the_head(tmp_path: Path) -> None:
    assert not load_gguf(tmp_path, tensors={"output.weight": ZEROS}).tie_embeddings


def test_the_rope_base_is_the_files_or_the_documented_default_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_gguf(tmp_path).rope.theta == 1e6
    assert not warnings_in(caplog)
    assert load_gguf(tmp_path, {"llama.rope.freq_base": None}).rope.theta == 10000
    (warning,) = warnings_in(caplog)
    assert "llama.rope.freq_base is missing; using 10000" in warning


def test_rope_freqs_become_factors(tmp_path: Path) -> None:
    factors = np.arange(1, 9, dtype=np.float32)
    assert load_gguf(tmp_path, tensors={"rope_freqs.weight": factors}).rope.factors == tuple(range(1, 9))
    for damaged, complaint in (
        (factors[:4], "holds 4 factors for head_dim 16"),
        (factors - 1, "must hold finite numbers above 0"),
        (factors.astype(np.float16), "must be F32"),
    ):
        with pytest.raises(ConfigError, match=rf"rope_freqs\.weight {complaint}"):
            load_gguf(tmp_path, tensors={"rope_freqs.weight": damaged})


@pytest.mark.parametrize(
    ("scaling", "kind", "factor", "max_position"),
    [
        ({"llama.rope.scaling.type": "none"}, "default", 1.0, 256),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, "linear", 2.0, 512),
        ({"llama.rope.scale_linear": 2.0}, "linear", 2.0, 512),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "yarn", 4.0, 1024),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            "yarn",
            4.0,
            256,
        ),
    ],
)
def test_rope_scaling_is_read_from_metadata(
    scaling: dict[str, Any], kind: str, factor: float, max_position: int, tmp_path: Path
) -> None:
    config = load_gguf(tmp_path, scaling)
    assert (config.rope.kind, config.rope.factor, config.max_position) == (kind, factor, max_position)
    assert config.rope.attention_factor == pytest.approx(1.1386 if kind == "yarn" else 1, abs=1e-4)


def test_a_gguf_ends_at_eos_eot_and_the_chat_end_marker(tmp_path: Path) -> None:
    tokens = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>"],
        "tokenizer.ggml.token_type": [3, 3, 1, 3, 1, 3],
        "tokenizer.ggml.eos_token_id": 1,
    }
    assert load_gguf(tmp_path, tokens).eos_token_ids == (1, 3, 5)
    assert load_gguf(tmp_path, tokens | {"tokenizer.ggml.eot_token_id": 2}).eos_token_ids == (1, 2, 3, 5)


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"llama.embedding_length": None}, r"llama\.embedding_length is missing"),
        ({"llama.attention.head_count": [4, 4]}, r"llama\.attention\.head_count must be an integer"),
        ({"llama.expert_count": 8}, r"llama\.expert_count says a mixture of experts"),
        ({"llama.attention.value_length": 32}, r"value_length other than the head size 16"),
        ({"llama.rope.dimension_count": 8}, r"rope\.dimension_count other than the head size 16"),
        ({"llama.rope.scaling.type": "longrope"}, r"rope\.scaling\.type is 'longrope'"),
        ({"tokenizer.ggml.bos_token_id": 8}, r"bos_token_id must be one id below the vocabulary size 8"),
    ],
)
def test_a_gguf_that_cannot_be_served_is_refused_with_file_and_key(
    metadata: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"m\.gguf: .*{complaint}"):
        load_gguf(tmp_path, metadata)


def test_a_gguf_of_another_architecture_or_without_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"general\.architecture 'bert' is not supported; supported: llama, qwen2"):
        load_model_config(write_gguf_file(tmp_path / "m.gguf", architecture="bert"))
    with pytest.raises(ConfigError, match=r"tensor token_embd\.weight is missing"):
        load_gguf(tmp_path, tensors={"token_embd.weight": None})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(data=st.data())
def test_a_damaged_gguf_is_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    path = (
        write_gguf_file(tmp_path / "whole.gguf") if not (tmp_path / "whole.gguf").exists() else tmp_path / "whole.gguf"
    )
    damaged = bytearray(path.read_bytes())
    for position in data.draw(st.lists(st.integers(0, 600), min_size=1, max_size=3)):
        damaged[position] = data.draw(st.integers(0, 255))
    (tmp_path / "m.gguf").write_bytes(damaged)
    with contextlib.suppress(ConfigError):
        load_model_config(tmp_path / "m.gguf")
