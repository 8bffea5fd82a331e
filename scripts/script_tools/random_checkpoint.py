"""Random checkpoints of any shape, in safetensors files as Hugging Face cuts them; written tensor by tensor."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightserve.model_config import load_model_config
from lightserve.model_worker.weights.layout import allocate, pieces_of
from lightserve.model_worker.weights.sharding import Shard

_DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT = 8  # of a file's first number, as the format wants it

MakeNumbers = Callable[[str, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True)
class _Stored:
    """A tensor's place in its file: bytes ``[start, stop)`` behind the header."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


def write_checkpoint(
    folder: Path, values: Mapping[str, Any], make: MakeNumbers, *, dtype: torch.dtype, max_file_bytes: int
) -> int:
    """Write ``config.json`` and the weights that belong to it.

    Args:
        folder: Exists.
        values: Of ``config.json``.
        make: Gives the tensor of a name and a shape, contiguous.
        dtype: Of the tensors.
        max_file_bytes: A file ends before the tensor that would take it beyond; each holds at least one.

    Returns:
        Bytes of all tensors.
    """
    (folder / "config.json").write_text(json.dumps(values))
    files = list(_cut(_shapes(folder), dtype.itemsize, max_file_bytes))
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    for name, tensors in zip(names, files, strict=True):
        _write_file(folder / name, tensors, make, dtype)
    total = sum(tensors[-1].stop for tensors in files)
    weight_map = {tensor.name: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def count_bytes(values: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Tell how many bytes of tensors ``write_checkpoint`` would write."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        return sum(torch.Size(shape).numel() for _, shape in _shapes(Path(folder))) * dtype.itemsize


def spread_numbers() -> MakeNumbers:
    """Make weights in float32 that set a model's next ids far apart, so that greedy ids do not hang on rounding."""
    generator = torch.Generator().manual_seed(0)

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1 and not name.endswith("bias"):
            return torch.empty(shape).uniform_(0.5, 1.5, generator=generator)
        return torch.randn(shape, generator=generator) * 0.2

    return make


def random_bits(max_numbers: int) -> MakeNumbers:
    """Make bfloat16 weights of either sign between 2^-7 and 2^-6, as fast as a disk can take them.

    Args:
        max_numbers: Of the largest tensor.
    """
    spare = 1 << 16
    generator = torch.Generator().manual_seed(0)
    words = torch.empty((max_numbers + spare) // 4 + 1, dtype=torch.int64)
    bits = words.random_(torch.iinfo(torch.int64).min, None, generator=generator).view(torch.int16)
    # Sign and mantissa stay as they were drawn; the exponent is 120 - 127.
    bits.bitwise_and_(torch.tensor(0x807F - 0x10000, dtype=torch.int16)).bitwise_or_(120 << 7)

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        start = int(torch.randint(spare, (), generator=generator))
        return bits.view(torch.bfloat16)[start:][: torch.Size(shape).numel()].view(shape)

    return make


def _shapes(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    config = load_model_config(folder)
    shard = Shard.of(config, 0, 1)
    weights = allocate(config, shard, torch.device("meta"), torch.float32)
    return [(piece.name, piece.shape) for piece in pieces_of(weights, config, shard)]


def _cut(shapes: Sequence[tuple[str, tuple[int, ...]]], itemsize: int, max_file_bytes: int) -> Iterator[list[_Stored]]:
    tensors: list[_Stored] = []
    for name, shape in shapes:
        num_bytes = torch.Size(shape).numel() * itemsize
        start = tensors[-1].stop if tensors else 0
        if tensors and start + num_bytes > max_file_bytes:
            yield tensors
            tensors, start = [], 0
        tensors.append(_Stored(name, shape, start, start + num_bytes))
    yield tensors


def _write_file(path: Path, tensors: Sequence[_Stored], make: MakeNumbers, dtype: torch.dtype) -> None:
    entries = {
        tensor.name: {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": tensor.shape,
            "data_offsets": (tensor.start, tensor.stop),
        }
        for tensor in tensors
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            numbers = make(tensor.name, tensor.shape).to(dtype).contiguous()
            file.write(numbers.view(-1).view(torch.uint8).numpy().data)
