#!/usr/bin/env python3
"""Launch every kernel a few times at small, odd sizes, without graphs: for tools under which each launch is slow.

    kernel_tour.py [--no_padding] [--own_products] [--compile_only]

Tiny engines run prompts of several lengths, alone and together, with every way of sampling, in float32 and bfloat16.
Exit status: 1 if some kernel was not launched.
"""

import argparse
import importlib
import pkgutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # PYTHONSAFEPATH leaves it out

from script_tools.plain_ids import draw_ids
from script_tools.random_checkpoint import spread_numbers, write_checkpoint

import lightserve.kernels
from lightserve.kernels.compile_ahead import compiling_ahead
from lightserve.kernels.gated_gemm import gated_gemm
from lightserve.kernels.skinny_gemm import MAX_ROWS
from lightserve.model_config import load_model_config
from lightserve.model_worker.cuda.blueprint import load_blueprint
from lightserve.model_worker.host import num_usable_cpus
from lightserve.model_worker.offline import OfflineBatch
from lightserve.model_worker.tensor_parallel import SingleRank
from lightserve.sampling_params import SamplingParams

_NUM_SLOTS, _NUM_ROWS, _MAX_LEN, _MAX_TOKENS = 1500, 16, 700, 600
_NUM_TOKENS = 3
_GREEDY = SamplingParams(_NUM_TOKENS, temperature=0.0)
_SAMPLING = (
    _GREEDY,
    SamplingParams(_NUM_TOKENS, temperature=1.0, seed=3, top_p=0.9, top_k=50, min_p=0.01),
    SamplingParams(_NUM_TOKENS, temperature=0.7, seed=5, repetition_penalty=1.3, min_new_tokens=2),
)


@dataclass(frozen=True)
class Model:
    """A tiny model's shape: odd ratios of heads, and biases (qwen2) or norms of heads (qwen3)."""

    architecture: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int
    vocab_size: int


@dataclass(frozen=True)
class Group:
    """Prompts that run together, the prompt tokens of a step, and the ways of sampling, one after the other."""

    prompt_lens: Sequence[int]
    chunk: int
    sampling: Sequence[SamplingParams] = _SAMPLING


@dataclass(frozen=True)
class Tour:
    """What is run: every group on every model in every dtype.

    Attributes:
        own_products: In bfloat16 no step has more tokens than our own products take.
    """

    models: Sequence[Model]
    dtypes: Sequence[torch.dtype]
    groups: Sequence[Group]
    own_products: bool = False

    def groups_in(self, dtype: torch.dtype) -> Sequence[Group]:
        """Give the groups as they run in one dtype."""
        if not self.own_products or dtype is not torch.bfloat16:
            return self.groups
        # prompts of a group that are done decode beside a chunk of the others
        return [replace(group, chunk=min(group.chunk, MAX_ROWS - len(group.prompt_lens) + 1)) for group in self.groups]


# A prompt of 530 is long enough for its keys to be copied side by side; one row and sixteen are what kernels have room
# for, so that no row is left unwritten.
_FULL_GROUPS = (Group([530], 600, [_GREEDY]), Group([3] * _NUM_ROWS, 600))
_PADDED_GROUP = Group([1, 37, 530], 200)
_MODELS = (Model("qwen2", 7, 1, 64, 104, 5003), Model("qwen3", 4, 2, 128, 128, 5003))
_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

Kernel: TypeAlias = tuple[str, str]


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    compiling = compiling_ahead(num_usable_cpus()) if options.compile_only else nullcontext()
    with compiling:
        tour = _tour(has_padding=not options.no_padding, own_products=options.own_products)
        launched = run_tour(tour, torch.device("cuda", 0))
    missing = sorted(all_kernels() - launched)
    print(f"{len(launched)} kernels were launched" + "".join(f"\nnever launched: {name}" for name in missing))
    return 1 if missing else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no_padding", action="store_true", help="no step in which rows are left unwritten on purpose")
    parser.add_argument("--own_products", action="store_true", help="in bfloat16 no product by the library")
    parser.add_argument("--compile_only", action="store_true", help="fill the compiler's cache, run nothing")
    return parser.parse_args(arguments)


def _tour(*, has_padding: bool, own_products: bool) -> Tour:
    groups = (*_FULL_GROUPS, _PADDED_GROUP) if has_padding else _FULL_GROUPS
    return Tour(_MODELS, [torch.float32, torch.bfloat16], groups, own_products)


def run_tour(tour: Tour, device: torch.device) -> set[Kernel]:
    """Run everything; return the kernels that were launched."""
    launched: set[Kernel] = set()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), _noting(launched):
        for model in tour.models:
            path = _write_model(Path(folder), model)
            for dtype in tour.dtypes:
                _run_engine(path, dtype, device, tour.groups_in(dtype))
        for dtype in tour.dtypes:
            if dtype.itemsize == 2:
                _multiply_many_rows(dtype, device)
    return launched


def all_kernels() -> set[Kernel]:
    """Every kernel, as module and name."""
    kernels = set()
    for found in pkgutil.iter_modules(lightserve.kernels.__path__, "lightserve.kernels."):
        module = importlib.import_module(found.name)
        kernels |= {
            (module.__name__, name)
            for name, value in vars(module).items()
            if isinstance(value, (JITFunction, InterpretedFunction))
            and name.endswith("_kernel")
            and value.fn.__module__ == module.__name__
        }
    return kernels


@contextmanager
def _noting(launched: set[Kernel]) -> Iterator[None]:
    """Note the kernels that are launched, compiled ones and interpreted ones."""
    kinds: tuple[Any, ...] = (JITFunction, InterpretedFunction)
    originals = [kind.run for kind in kinds]

    def noting(run: Any) -> Any:
        def note_and_run(kernel: Any, *args: Any, **options: Any) -> Any:
            launched.add((kernel.fn.__module__, kernel.fn.__name__))
            return run(kernel, *args, **options)

        return note_and_run

    for kind, original in zip(kinds, originals, strict=True):
        kind.run = noting(original)
    try:
        yield
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.run = original


def _write_model(folder: Path, model: Model) -> Path:
    path = folder / model.architecture
    path.mkdir()
    values = {
        "architectures": [_ARCHITECTURES[model.architecture]],
        "model_type": model.architecture,
        "dtype": "float32",
        "hidden_size": model.width,
        "intermediate_size": 136,
        "num_hidden_layers": 1,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": _MAX_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    write_checkpoint(path, values, spread_numbers(), dtype=torch.float32, max_file_bytes=1 << 30)
    return path


def _multiply_many_rows(dtype: torch.dtype, device: torch.device) -> None:
    """Launch what is for more rows than these engines' steps have, with more tiles than multiprocessors."""
    x, weight = (torch.randn(shape, dtype=dtype, device=device) for shape in [(1500, 104), (1496, 2, 104)])
    gated_gemm(x, weight)


def _run_engine(path: Path, dtype: torch.dtype, device: torch.device, groups: Sequence[Group]) -> None:
    config = load_model_config(path)
    blueprint = load_blueprint(
        config,
        SingleRank(),
        num_rows=_NUM_ROWS,
        max_tokens=_MAX_TOKENS,
        max_req_total_len=_MAX_LEN,
        vocab_size=config.vocab_size,
        dtype=dtype,
        device=device,
        load_format="auto",
    )
    engine = blueprint.build(_NUM_SLOTS, None)
    random = np.random.default_rng(0)
    slots = random.permutation(_NUM_SLOTS).astype(np.int32)
    for group in groups:
        for sampling in group.sampling:
            prompts = [draw_ids(random, config.vocab_size, length).tolist() for length in group.prompt_lens]
            batch = OfflineBatch(engine, slots, chunked_prefill_size=group.chunk)
            batch.run(prompts, [sampling] * len(prompts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
