"""Two ranks as two processes, over gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model_worker import rank_process
from tests.model_worker.rank_process import PROMPTS, SAMPLING
from tests.model_worker.references import make_reference
from tests.model_worker.tiny_engine import generate, open_engine


@pytest.mark.parametrize(
    ("architecture", "num_kv_heads"),
    [("llama", 2), ("llama", 1), ("qwen2", 2), ("qwen3", 1)],  # of one kv head, both ranks hold a copy
)
def test_two_ranks_sample_the_ids_of_one(architecture: str, num_kv_heads: int, tmp_path: Path) -> None:
    make_reference(architecture, tmp_path, num_key_value_heads=num_kv_heads)
    expected = generate(open_engine(tmp_path), PROMPTS, SAMPLING, chunk=7)
    processes = [
        subprocess.Popen([sys.executable, rank_process.__file__, str(tmp_path), str(rank)], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in processes:
        found = json.loads(process.communicate()[0])
        assert [ids for ids, _ in found] == [req.output_ids for req in expected]
        for (_, logprobs), req in zip(found, expected, strict=True):
            assert logprobs == pytest.approx(req.logprobs, abs=1e-3)
