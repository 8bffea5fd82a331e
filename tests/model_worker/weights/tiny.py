"""Tiny random models, saved as people save them: by transformers, and as GGUF the way llama.cpp writes it."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType

CONFIG_CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
MODEL_CLASSES: dict[str, Any] = {
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "qwen3": transformers.Qwen3ForCausalLM,
}
GGUF_STEMS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
State = dict[str, torch.Tensor]


def make_model(architecture: str, **overrides: Any) -> Any:
    """A transformers model with random float32 weights that float16 holds exactly."""
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "max_position_embeddings": 256,
        "head_dim": 16,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    torch.manual_seed(0)
    config = CONFIG_CLASSES[architecture](**values)
    model = MODEL_CLASSES[architecture](config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter).half())
    return model


def save_model(model: Any, folder: Path, **save_options: Any) -> State:
    """Save a model's folder and return its tensors; a tied head is among them."""
    model.save_pretrained(folder, **save_options)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def write_gguf(
    model: Any,
    path: Path,
    architecture: str,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
) -> State:
    """Write a model as llama.cpp's converter does, vectors always as F32; return its tensors."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    for key, value in (metadata or {f"{architecture}.rope.freq_base": 10000.0}).items():
        _add(writer, key, value)
    state: State = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers = stored_order(name, tensor.numpy(), architecture, config)
        stored_kind = kind if tensor.dim() == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(numbers, stored_kind), raw_dtype=stored_kind)
    for name, numbers in (extra or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def stored_order(name: str, numbers: "np.ndarray[Any, Any]", architecture: str, config: Any) -> "np.ndarray[Any, Any]":
    """Permute q and k of the llama architecture as the converter does."""
    if architecture != "llama" or not ("q_proj" in name or "k_proj" in name):
        return numbers
    num_heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    halves = numbers.reshape(num_heads, 2, numbers.shape[0] // num_heads // 2, *numbers.shape[1:])
    return halves.swapaxes(1, 2).reshape(numbers.shape)


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_STEMS[inner]}.{kind}"


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)
