"""Weights in a .gguf file, dequantised block by block."""

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from lightserve.errors import ConfigError
from lightserve.gguf_header import GgufHeader, GgufTensor
from lightserve.model_config import ModelConfig
from lightserve.model_worker.weights.layout import Piece

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# The library works on 16 rows at a time. Rows of 4,096 keep its temporaries in the second-level cache: 309 million
# numbers a second and core for Q4_1; 159 at the default model's own 576 columns, 175 at 65,536.
_ROW_ELEMENTS = 4096


class GgufFile:
    """The tensors of a .gguf file under their Hugging Face names.

    The llama architecture alone stores the rows of each q and k head with the two halves of RoPE interleaved: stored
    row 2 j + t is row t * head_dim / 2 + j. ``read`` puts them back, so it must be asked for whole heads of these.

    Args:
        config: Whose ``weights_path`` is the file.

    Raises:
        ConfigError: The file is damaged.
    """

    def __init__(self, config: ModelConfig) -> None:
        header = GgufHeader.read(Path(config.weights_path))
        self._head_dim = config.head_dim
        self._interleaved = re.compile(r"\.[qk]_proj\.") if config.architecture == "llama" else None
        self._tensors = {_full_name(name): tensor for name, tensor in header.tensors.items()}
        # Copy on write, because torch wants writable memory even where it only reads.
        self._data: npt.NDArray[np.uint8] = np.memmap(header.path, dtype=np.uint8, mode="c")
        self.path = header.path

    @property
    def origin(self) -> str:
        """The file."""
        return str(self.path)

    @property
    def names(self) -> Collection[str]:
        """Every tensor."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape.

        Raises:
            ConfigError: The gguf library cannot dequantise it.
        """
        tensor = self._tensors[name]
        if not _can_dequantize(tensor.kind):
            raise ConfigError(f"{self.path}: tensor {tensor.name} is {tensor.kind.name}, which cannot be dequantised")
        return tensor.shape

    def read(self, piece: Piece) -> torch.Tensor:
        """Return a block in float32, or in its own dtype where it is not quantised."""
        block = self._rows(self._tensors[piece.name], piece.rows)
        if self._interleaved is not None and self._interleaved.search(piece.name):
            block = _join_halves(block, self._head_dim)
        if piece.columns is not None:
            block = block[:, piece.columns.start : piece.columns.stop]
        return block

    def _rows(self, tensor: GgufTensor, rows: range) -> torch.Tensor:
        if len(tensor.shape) == 1:
            return self._numbers(tensor, rows.start, len(rows))
        width = tensor.shape[1]
        return self._numbers(tensor, rows.start * width, len(rows) * width).view(len(rows), width)

    def _numbers(self, tensor: GgufTensor, start: int, count: int) -> torch.Tensor:
        block_size, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        first = tensor.offset + start // block_size * block_bytes
        raw = self._data[first : first + count // block_size * block_bytes]
        if tensor.kind in _PLAIN:
            return torch.from_numpy(raw).view(_PLAIN[tensor.kind])
        return torch.from_numpy(_dequantize(raw, tensor.kind))


def _dequantize(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    row_bytes = _ROW_ELEMENTS // block_size * block_bytes
    whole = len(raw) // row_bytes * row_bytes
    parts = [raw[:whole].reshape(-1, row_bytes), raw[whole:].reshape(1, -1)]
    numbers = [dequantize(part, kind).ravel() for part in parts if part.size]
    return numbers[0] if len(numbers) == 1 else np.concatenate(numbers)


def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    if kind in _PLAIN:
        return True
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _join_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    return rows.view(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _full_name(name: str) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None:
        return _NAMES.get(name, name)
    layer, stem, kind = match.groups()
    return f"model.layers.{layer}.{_LAYER_NAMES[stem]}.{kind}" if stem in _LAYER_NAMES else name
