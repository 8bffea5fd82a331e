"""GGUF files with a header and next to no weights."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

METADATA: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1e6,
}
ZEROS = np.zeros((8, 64), dtype=np.float32)
TENSORS: dict[str, Any] = {"token_embd.weight": ZEROS, "blk.0.attn_q.weight": ZEROS}


def write_gguf_file(
    path: Path,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write the usual metadata and tensors with changes; None takes one away."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (METADATA | (metadata or {})).items():
        match value:
            case None:
                pass
            case int() if key == "general.alignment":
                writer.add_custom_alignment(value)
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, numbers in (TENSORS | (tensors or {})).items():
        if numbers is not None:
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
