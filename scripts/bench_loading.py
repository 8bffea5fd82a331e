"""Measure how fast weights come from files that the system has in its page cache to the device.

    bench_loading.py --model_dir scripts/presets/llama-3.1-8b --folder /tmp/checkpoint --tp 1,2 --json loading.json

Writes a random bfloat16 checkpoint of the model's shape, in files as Hugging Face cuts them, and removes it at the end.
A folder that exists already is loaded from and left as it is. Each load is one process's first, as in a server:
page-locked memory is taken anew. The device is opened before the clock starts. Bytes are those that arrive there.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, ParamSpec, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import torch
from script_tools.flags import output_file, positive_float, positive_int, positive_ints
from script_tools.json_file import write_json
from script_tools.random_checkpoint import count_bytes, random_bits, write_checkpoint
from script_tools.surroundings import describe_surroundings

from lightserve.errors import ConfigError
from lightserve.model_config import load_model_config
from lightserve.model_worker.host import num_usable_cpus
from lightserve.model_worker.weights.loader import load_weights
from lightserve.model_worker.weights.sharding import Shard

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Load:
    """One rank's share, loaded once."""

    tp: int
    rank: int
    gb: float
    seconds: float
    gb_per_s: float


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    if problem := _in_new_process(_device_problem, options.device):
        print(f"bench_loading.py: --device {options.device}: {problem}", file=sys.stderr)
        return 2
    is_ours = not options.folder.exists()
    try:
        if is_ours:
            _write(options.values, options.folder, options.file_gb)
        loads = [
            _load_in_new_process(options.folder, tp, rank, options.device)
            for tp in options.tp
            for rank in range(tp)
            for _ in range(options.repeats)
        ]
    except OSError as error:
        print(f"bench_loading.py: {error}", file=sys.stderr)
        return 2
    finally:
        if is_ours and not options.keep and options.folder.exists():
            shutil.rmtree(options.folder)
    for tp in options.tp:
        rates = [load.gb_per_s for load in loads if load.tp == tp]
        print(f"tp {tp}: median {median(rates):.2f} GB/s, {min(rates):.2f} to {max(rates):.2f}")
    if options.json is not None:
        surroundings = describe_surroundings(["bench_loading.py", *arguments])
        write_json(options.json, {**surroundings, "device": options.device, "cpus": num_usable_cpus(), "loads": loads})
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", type=Path, required=True, help="folder with the configuration")
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint goes, or is")
    parser.add_argument("--keep", action="store_true", help="leave it there")
    parser.add_argument("--num_layers", type=positive_int, help="fewer layers than the configuration has")
    parser.add_argument("--file_gb", type=positive_float, default=5.0, help="largest file (%(default)s)")
    parser.add_argument("--tp", type=positive_ints, default=[1], help="tensor-parallel sizes, each rank by itself")
    parser.add_argument("--device", default="cuda:0", help="where to (%(default)s)")
    parser.add_argument("--repeats", type=positive_int, default=3, help="loads of each rank (%(default)s)")
    parser.add_argument("--json", type=output_file, help="write everything here")
    options = parser.parse_args(arguments)
    is_there = options.folder.exists()
    source = options.folder if is_there else options.model_dir
    try:
        config = load_model_config(source, "auto" if is_there else "dummy")
        for tp in options.tp:
            Shard.of(config, 0, tp)
        if not is_there:
            options.values = _read_values(source, options.num_layers)
    except (ConfigError, OSError) as error:
        parser.error(f"--folder: {error}" if is_there else str(error))
    return options


def _read_values(model_dir: Path, num_layers: int | None) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    return values | ({} if num_layers is None else {"num_hidden_layers": num_layers})


def _write(values: dict[str, Any], folder: Path, file_gb: float) -> None:
    print(f"writing {count_bytes(values, torch.bfloat16) / 1e9:.2f} GB to {folder}", flush=True)
    folder.mkdir(parents=True)
    start = time.monotonic()
    make = random_bits(values["hidden_size"] * max(values["vocab_size"], values["intermediate_size"]))
    num_bytes = write_checkpoint(folder, values, make, dtype=torch.bfloat16, max_file_bytes=int(file_gb * 1e9))
    print(f"wrote {num_bytes / 1e9:.2f} GB in {time.monotonic() - start:.1f} s", flush=True)


def _load_in_new_process(folder: Path, tp: int, rank: int, device: str) -> Load:
    load = _in_new_process(_load, folder, tp, rank, device)
    print(load, flush=True)
    return load


def _in_new_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        return processes.submit(function, *args, **kwargs).result()


def _device_problem(device: str) -> str | None:
    """Say why a device cannot be opened; None if it can."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts that it has it
        return str(error).partition("\n")[0]
    return None


def _load(folder: Path, tp: int, rank: int, device_name: str) -> Load:
    device, config = torch.device(device_name), load_model_config(folder)
    torch.zeros(1, device=device)
    start = time.perf_counter()
    shard = Shard.of(config, rank, tp)
    weights = load_weights(config, shard, device=device, dtype=torch.bfloat16, load_format="auto")
    seconds = time.perf_counter() - start
    tensors = [weights.embedding, weights.final_norm, *([] if config.tie_embeddings else [weights.lm_head])]
    for layer in weights.layers:
        tensors += [value for name in layer.__slots__ if (value := getattr(layer, name)) is not None]
    gb = sum(tensor.nbytes for tensor in tensors) / 1e9
    return Load(tp, rank, gb, seconds, gb / seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
