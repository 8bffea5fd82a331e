"""Weights from safetensors and GGUF files, compared tensor by tensor with the model that was saved."""

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lightserve.errors import ConfigError
from lightserve.model_config import load_model_config
from lightserve.model_worker.weights import loader
from lightserve.model_worker.weights.loader import load_weights
from lightserve.model_worker.weights.model_weights import LayerWeights, ModelWeights
from lightserve.model_worker.weights.sharding import Shard
from tests.model_worker.weights.tiny import State, make_model, save_model, stored_order, write_gguf

CPU = torch.device("cpu")
ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3"]
GGUF_ARCHITECTURES = ["llama", "qwen2", "qwen3"]
Kind = GGMLQuantizationType


def name_of(kind: Kind) -> str:
    return kind.name


def load(path: Path, rank: int = 0, world_size: int = 1, dtype: torch.dtype = torch.float32) -> ModelWeights:
    config = load_model_config(path)
    return load_weights(config, Shard.of(config, rank, world_size), device=CPU, dtype=dtype, load_format="auto")


def expected_layer(state: State, index: int) -> LayerWeights:
    def get(*names: str) -> torch.Tensor:
        return torch.cat([state[f"model.layers.{index}.{name}"] for name in names])

    attention = [f"self_attn.{letter}_proj" for letter in "qkv"]
    has_bias, has_norm = f"model.layers.{index}.{attention[0]}.bias" in state, "model.layers.0.self_attn.q_norm.weight"
    return LayerWeights(
        input_norm=get("input_layernorm.weight"),
        qkv=get(*(f"{name}.weight" for name in attention)),
        qkv_bias=get(*(f"{name}.bias" for name in attention)) if has_bias else None,
        q_norm=get("self_attn.q_norm.weight") if has_norm in state else None,
        k_norm=get("self_attn.k_norm.weight") if has_norm in state else None,
        o_proj=get("self_attn.o_proj.weight"),
        post_attention_norm=get("post_attention_layernorm.weight"),
        gate_up=torch.stack([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")], dim=1),
        down_proj=get("mlp.down_proj.weight"),
    )


def assert_same(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    if found is None or expected is None:
        assert found is expected
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found.is_contiguous()


def assert_holds(weights: ModelWeights, state: State) -> None:
    assert_same(weights.embedding, state["model.embed_tokens.weight"])
    assert_same(weights.lm_head, state["lm_head.weight"])
    assert_same(weights.final_norm, state["model.norm.weight"])
    for index, layer in enumerate(weights.layers):
        expected = expected_layer(state, index)
        for field in LayerWeights.__slots__:
            assert_same(getattr(layer, field), getattr(expected, field))


def edit_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(make_model("llama"), tmp_path)
    return tmp_path


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_safetensors_load_equals_the_saved_model(architecture: str, tied: bool, tmp_path: Path) -> None:
    state = save_model(make_model(architecture, tie_word_embeddings=tied), tmp_path)
    weights = load(tmp_path)
    assert_holds(weights, state)
    assert (weights.lm_head is weights.embedding) == tied


def test_a_head_size_other_than_hidden_over_heads_loads(tmp_path: Path) -> None:
    state = save_model(make_model("qwen3", head_dim=32), tmp_path)
    weights = load(tmp_path)
    assert_holds(weights, state)
    assert weights.layers[0].o_proj.shape == (64, 4 * 32)


def test_tensors_cut_into_many_blocks_arrive_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_BLOCK_ELEMENTS", 100)
    assert_holds(load(folder), make_model("llama").state_dict())


def test_only_files_in_the_index_are_read(tmp_path: Path) -> None:
    state = save_model(make_model("llama"), tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    stray = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for name in ("model.safetensors", "consolidated.safetensors", "model-99999-of-00003.safetensors"):
        save_file(stray, tmp_path / name)
    assert_holds(load(tmp_path), state)


def test_numbers_are_converted_to_the_dtype_asked_for(folder: Path) -> None:
    weights = load(folder, dtype=torch.bfloat16)
    expected = make_model("llama").state_dict()["model.embed_tokens.weight"].bfloat16()
    assert_same(weights.embedding, expected)


def test_a_head_saved_beside_a_tied_one_is_ignored(tmp_path: Path) -> None:
    state = save_model(make_model("llama", tie_word_embeddings=True), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = torch.zeros_like(state["lm_head.weight"])
    save_file(stored, tmp_path / "model.safetensors")
    assert_holds(load(tmp_path), state)


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    save_model(make_model("llama", tie_word_embeddings=True), tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"missing: lm_head\.weight; is tie_word_embeddings missing"):
        load(tmp_path)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_shards_joined_again_are_the_whole_model(architecture: str, world_size: int, tmp_path: Path) -> None:
    state = save_model(make_model(architecture), tmp_path)
    whole = load(tmp_path)
    shards = [load(tmp_path, rank, world_size) for rank in range(world_size)]
    for table in ("embedding", "lm_head"):
        rows = torch.cat([getattr(shard, table) for shard in shards])
        assert_same(rows[:131], getattr(whole, table))
        assert not rows[131:].any()
    for index, layer in enumerate(whole.layers):
        parts = [shard.layers[index] for shard in shards]
        assert_same(torch.cat([part.o_proj for part in parts], dim=1), layer.o_proj)
        assert_same(torch.cat([part.down_proj for part in parts], dim=1), layer.down_proj)
        assert_same(torch.cat([part.gate_up for part in parts]), layer.gate_up)
        assert_qkv_shards(parts, state, index)


def assert_qkv_shards(parts: list[LayerWeights], state: State, index: int) -> None:
    """4 query heads and 2 kv heads of 16 rows; with 4 ranks each kv head is held twice."""
    world_size = len(parts)
    for kind in ("weight", "bias"):
        names = [f"model.layers.{index}.self_attn.{letter}_proj.{kind}" for letter in "qkv"]
        if names[0] not in state:
            continue
        q, k, v = (state[name] for name in names)
        for rank, part in enumerate(parts):
            kv = slice(rank * 2 // world_size * 16, rank * 2 // world_size * 16 + 16)
            expected = torch.cat([q.chunk(world_size)[rank], k[kv], v[kv]])
            assert_same(part.qkv if kind == "weight" else part.qkv_bias, expected)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight$"):
        load(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=80)
    with pytest.raises(ConfigError, match=r"gate_proj\.weight has shape \[96, 64\].*\[80, 64\]"):
        load(folder)


def test_a_bias_that_the_model_would_not_add_is_refused(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no use for: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)


def test_a_stray_tensor_outside_the_layers_is_named_in_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["score.weight"] = torch.ones(2)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(stored, folder / "model.safetensors")
    load(folder)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        f"{folder}: not used: score.weight"
    ]


def test_integers_in_place_of_weights_are_refused(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"] = stored["model.norm.weight"].to(torch.int8)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"tensor model\.norm\.weight is I8; supported: F32, F16, BF16"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_model(make_model("llama"), tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"{shard.name}: No such file"):
        load(tmp_path)


def test_a_tensor_absent_from_the_shard_that_the_index_names_is_refused(tmp_path: Path) -> None:
    save_model(make_model("llama"), tmp_path, max_shard_size="50KB")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {"model.norm.weight": weight_map["model.embed_tokens.weight"]})
    with pytest.raises(ConfigError, match=r"tensor model\.norm\.weight is missing, which .*index\.json places there"):
        load(tmp_path)


@pytest.mark.parametrize("weight_map", [{"a": "../other.safetensors"}, {"a": "/etc/passwd"}, {"a": 7}, {}, [], None])
def test_an_index_that_leads_nowhere_or_out_of_the_folder_is_refused(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="weight_map must name"):
        load(folder)


def test_pickled_weights_are_refused_with_a_way_out(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only as pytorch_model\.bin, a pickle.*convert it to safetensors"):
        load(folder)


def test_a_folder_without_weights_says_what_was_looked_for(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        load(folder)


def test_a_git_lfs_pointer_is_recognised(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ConfigError, match="Git LFS pointer"):
        load(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(share=st.floats(0, 0.9999))
def test_a_safetensors_file_cut_anywhere_is_refused(folder: Path, share: float) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ConfigError, match=r"model\.safetensors: damaged or cut short"):
            load(folder)
    finally:
        path.write_bytes(whole)


def test_more_weights_than_memory_are_refused_before_they_are_taken(folder: Path) -> None:
    config = load_model_config(folder, "dummy")
    for vocab_size in (2**31 - 1, 2**60):
        huge = msgspec.structs.replace(config, vocab_size=vocab_size)
        with pytest.raises(ConfigError, match=r"take .* GiB of memory are free|do not fit"):
            load_weights(huge, Shard.of(huge, 0, 1), device=CPU, dtype=torch.float32, load_format="dummy")


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=name_of)
@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_gguf_load_equals_the_saved_model(architecture: str, kind: Kind, tmp_path: Path) -> None:
    state = write_gguf(make_model(architecture), tmp_path / "m.gguf", architecture, kind)
    if kind == Kind.BF16:  # the library rounds as bfloat16 does
        state = {name: tensor.bfloat16().float() if tensor.dim() == 2 else tensor for name, tensor in state.items()}
    assert_holds(load(tmp_path / "m.gguf"), state)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3), (4, 4), (4, 1)])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_q_and_k_are_put_in_order_for_llama_alone(architecture: str, heads: int, kv_heads: int, tmp_path: Path) -> None:
    model = make_model(
        architecture, hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16
    )
    state = write_gguf(model, tmp_path / "m.gguf", architecture, Kind.F16)
    assert_holds(load(tmp_path / "m.gguf"), state)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0], ids=name_of)
def test_a_gguf_without_output_weight_uses_the_embedding(kind: Kind, tmp_path: Path) -> None:
    write_gguf(make_model("llama", tie_word_embeddings=True), tmp_path / "m.gguf", "llama", kind)
    weights = load(tmp_path / "m.gguf")
    assert weights.lm_head is weights.embedding


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=name_of)
def test_quantised_tensors_equal_the_librarys_dequantised_ones(kind: Kind, tmp_path: Path) -> None:
    model = make_model("llama")
    state = write_gguf(model, tmp_path / "m.gguf", "llama", kind)
    for name, tensor in state.items():
        if tensor.dim() == 2:
            numbers = stored_order(name, tensor.numpy(), "llama", model.config)
            rounded = gguf.quants.dequantize(gguf.quants.quantize(numbers, kind), kind)
            state[name] = original_order(name, torch.from_numpy(rounded))
    assert_holds(load(tmp_path / "m.gguf"), state)


def original_order(name: str, rows: torch.Tensor) -> torch.Tensor:
    if not ("q_proj" in name or "k_proj" in name):
        return rows
    order = [head * 16 + 2 * j + half for head in range(len(rows) // 16) for half in range(2) for j in range(8)]
    return rows[order]


@pytest.mark.parametrize(
    "kind",
    [
        Kind.Q2_K,
        Kind.Q3_K,
        Kind.Q4_K,
        Kind.Q5_K,
        Kind.Q6_K,
        Kind.IQ4_NL,
        Kind.IQ4_XS,
        Kind.IQ2_XS,
        Kind.IQ3_S,
        Kind.MXFP4,
    ],
    ids=name_of,
)
def test_kinds_that_only_llama_cpp_writes_are_dequantised(kind: Kind, tmp_path: Path) -> None:
    model = make_model("qwen2", hidden_size=256, intermediate_size=512)
    raw = random_blocks(model, kind)
    write_raw_gguf(model, tmp_path / "m.gguf", kind, raw)
    weights = load(tmp_path / "m.gguf")
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    assert expected.isfinite().all()
    assert_same(weights.layers[1].down_proj, expected)


def random_blocks(model: Any, kind: Kind) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (model.config.hidden_size, model.config.intermediate_size // block_size * block_bytes)
    # Bytes below 60 make every half-precision scale a finite one, wherever a block keeps it.
    return np.random.default_rng(0).integers(0, 60, shape, dtype=np.uint8)


def write_raw_gguf(model: Any, path: Path, kind: Kind, raw: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
    write_gguf(model, path, "qwen2")
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".raw"), "qwen2")
    for field in reader.fields.values():
        if field.name.startswith("qwen2."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if tensor.name == "blk.1.ffn_down.weight":
            writer.add_tensor(tensor.name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".raw").replace(path)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0], ids=name_of)
def test_gguf_shards_are_cut_from_the_whole(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_BLOCK_ELEMENTS", 3000)
    write_gguf(make_model("llama"), tmp_path / "m.gguf", "llama", kind)
    whole = load(tmp_path / "m.gguf").layers[1]
    parts = [load(tmp_path / "m.gguf", rank, 2).layers[1] for rank in range(2)]
    assert_same(torch.cat([part.down_proj for part in parts], dim=1), whole.down_proj)
    assert_same(torch.cat([part.qkv[:32] for part in parts]), whole.qkv[:64])
    assert_same(torch.cat([part.qkv[32:48] for part in parts]), whole.qkv[64:96])


def test_a_gguf_tensor_the_model_does_not_know_is_refused_in_a_layer_and_named_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ones = np.ones(64, dtype=np.float32)
    write_gguf(make_model("llama"), tmp_path / "a.gguf", "llama", extra={"blk.0.attn_sub_norm.weight": ones})
    with pytest.raises(ConfigError, match=r"no use for: blk\.0\.attn_sub_norm\.weight"):
        load(tmp_path / "a.gguf")
    extra = {"rope_freqs.weight": ones[:8], "cls.weight": ones}
    write_gguf(make_model("llama"), tmp_path / "b.gguf", "llama", extra=extra)
    load(tmp_path / "b.gguf")
    assert [record.message for record in caplog.records] == [f"{tmp_path / 'b.gguf'}: not used: cls.weight"]


def test_a_kind_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    model = make_model("qwen2", hidden_size=256, intermediate_size=512)
    write_raw_gguf(model, tmp_path / "m.gguf", Kind.Q8_K, random_blocks(model, Kind.Q8_K))
    with pytest.raises(ConfigError, match=r"blk\.1\.ffn_down\.weight is Q8_K, which cannot be dequantised"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_safetensors_and_gguf_f16_load_the_same(architecture: str, tmp_path: Path) -> None:
    model = make_model(architecture)
    save_model(model, tmp_path / "folder")
    write_gguf(model, tmp_path / "m.gguf", architecture, Kind.F16)
    a, b = load(tmp_path / "folder"), load(tmp_path / "m.gguf")
    assert_same(a.embedding, b.embedding)
    for left, right in zip(a.layers, b.layers, strict=True):
        for field in LayerWeights.__slots__:
            assert_same(getattr(left, field), getattr(right, field))


def test_dummy_weights_are_finite_of_unit_gain_and_the_same_at_every_start(folder: Path) -> None:
    config = load_model_config(folder)
    before = sorted(folder.iterdir())

    def make(rank: int) -> ModelWeights:
        return load_weights(config, Shard.of(config, rank, 2), device=CPU, dtype=torch.float32, load_format="dummy")

    first, again, other = make(0), make(0), make(1)
    assert_same(first.layers[1].qkv, again.layers[1].qkv)
    assert not torch.equal(first.layers[1].qkv, other.layers[1].qkv)
    assert_same(first.layers[0].input_norm, torch.ones(64))
    gain = first.layers[0].gate_up.var() * 64
    assert 0.9 < gain < 1.1
    assert not other.embedding[131 - 66 :].any()
    assert sorted(folder.iterdir()) == before


def test_dummy_weights_need_a_configuration_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    config = load_model_config(folder, "dummy")
    weights = load_weights(config, Shard.of(config, 0, 1), device=CPU, dtype=torch.bfloat16, load_format="dummy")
    assert all(layer.down_proj.isfinite().all() for layer in weights.layers)
