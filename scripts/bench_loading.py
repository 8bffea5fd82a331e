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
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import torch
from script_tools.flags import integers
from script_tools.json_file import write_json
from script_tools.random_checkpoint import random_bits, write_checkpoint
from script_tools.surroundings import describe_surroundings

from lightserve.model_config import load_model_config
from lightserve.model_worker.host import num_usable_cpus
from lightserve.model_worker.weights.loader import load_weights
from lightserve.model_worker.weights.sharding import Shard


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
    is_ours = not options.folder.exists()
    if is_ours:
        _write(options.model_dir, options.folder, options.num_layers, options.file_gb)
    try:
        loads = [
            _load_in_new_process(options.folder, tp, rank, options.device)
            for tp in options.tp
            for rank in range(tp)
            for _ in range(options.repeats)
        ]
    finally:
        if is_ours and not options.keep:
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
    parser.add_argument("--num_layers", type=int, help="fewer layers than the configuration has")
    parser.add_argument("--file_gb", type=float, default=5.0, help="largest file (%(default)s)")
    parser.add_argument("--tp", type=integers, default=[1], help="tensor-parallel sizes, each rank by itself")
    parser.add_argument("--device", default="cuda:0", help="where to (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="loads of each rank (%(default)s)")
    parser.add_argument("--json", type=Path, help="write everything here")
    return parser.parse_args(arguments)


def _write(model_dir: Path, folder: Path, num_layers: int | None, file_gb: float) -> None:
    values = json.loads((model_dir / "config.json").read_text())
    values["num_hidden_layers"] = num_layers or values["num_hidden_layers"]
    folder.mkdir(parents=True)
    start = time.monotonic()
    make = random_bits(values["hidden_size"] * max(values["vocab_size"], values["intermediate_size"]))
    num_bytes = write_checkpoint(folder, values, make, dtype=torch.bfloat16, max_file_bytes=int(file_gb * 1e9))
    print(f"wrote {num_bytes / 1e9:.2f} GB in {time.monotonic() - start:.1f} s", flush=True)


def _load_in_new_process(folder: Path, tp: int, rank: int, device: str) -> Load:
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        load = processes.submit(_load, folder, tp, rank, device).result()
    print(load, flush=True)
    return load


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
