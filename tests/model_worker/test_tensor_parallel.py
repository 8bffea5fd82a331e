"""Two ranks as two processes, over gloo."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightserve.model_worker.tensor_parallel import SingleRank
from tests.model_worker import rank_process
from tests.model_worker.references import make_reference

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),  # both ranks hold a copy
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, (architecture, overrides) in MODELS.items():
        make_reference(architecture, folder / name, **overrides)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each rank generated, by model."""
    processes = [
        subprocess.Popen([sys.executable, rank_process.__file__, str(folder), str(rank)], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    return [json.loads(process.communicate()[0]) for process in processes]


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_sample_the_ids_of_one(name: str, folder: Path, found: list[dict[str, Any]]) -> None:
    expected = rank_process.run(folder / name, SingleRank())
    for by_model in found:
        for (ids, logprobs), (expected_ids, expected_logprobs) in zip(by_model[name], expected, strict=True):
            assert ids == expected_ids
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)
