"""The engine against transformers on tiny random models, in float32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from script_tools.recording_model import RecordingModel

from lightserve.model_worker.cpu.runner import CpuEngine
from tests.model_worker.references import make_reference, reference_greedy
from tests.model_worker.tiny_engine import greedy, open_engine, random_prompts

LENGTHS = (1, 5, 17, 40, 3)
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "beta_fast": 4.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied head": ("llama", {"tie_word_embeddings": True}),
    "llama, 9 heads over 3": ("llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "llama, 32 heads over 8": ("llama", {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 8}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, head_dim 32": ("llama", {"head_dim": 32}),
    "qwen2, tied head": ("qwen2", {"tie_word_embeddings": True}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


def first_logits(engine: CpuEngine, prompt_ids: Sequence[int], *, chunk: int = 512) -> torch.Tensor:
    """[columns], logits after the prompt."""
    plain = engine.runner.model
    engine.runner.model = recording = RecordingModel(plain)
    greedy(engine, [prompt_ids], 1, chunk=chunk)
    engine.runner.model = plain
    return recording.recorded[0][0]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_ids_and_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, overrides = MODELS[name]
    reference = make_reference(architecture, tmp_path, **overrides)
    engine = open_engine(tmp_path)
    prompts = random_prompts(LENGTHS)
    expected = [reference_greedy(reference, prompt_ids, 12) for prompt_ids in prompts]
    alone = [greedy(engine, [prompt_ids], 12)[0] for prompt_ids in prompts]
    assert alone == [ids for ids, _ in expected]
    assert greedy(engine, prompts, 12, chunk=9) == alone
    for prompt_ids, (_, logits) in zip(prompts, expected, strict=True):
        torch.testing.assert_close(first_logits(engine, prompt_ids)[:131], logits, rtol=0, atol=1e-3)


def test_positions_beyond_yarns_original_context_equal_transformers(tmp_path: Path) -> None:
    reference = make_reference("llama", tmp_path, rope_parameters=YARN)
    engine = open_engine(tmp_path)
    (prompt_ids,) = random_prompts([200])
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt_ids])).logits[0, 150]
    torch.testing.assert_close(first_logits(engine, prompt_ids[:151])[:131], expected, rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    folder = tmp_path_factory.mktemp("model")
    make_reference("llama", folder)
    return open_engine(folder)


@pytest.mark.parametrize("chunk", [1, 7, 16, 36, 37, 64])
def test_a_prompt_in_chunks_gives_the_logits_of_one_pass(engine: CpuEngine, chunk: int) -> None:
    (prompt_ids,) = random_prompts([37])
    whole = first_logits(engine, prompt_ids)
    torch.testing.assert_close(first_logits(engine, prompt_ids, chunk=chunk), whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 16, 36, 37, 64])
def test_requests_in_chunks_beside_decoding_ones_get_the_ids_they_get_alone(engine: CpuEngine, chunk: int) -> None:
    prompts = random_prompts([4, 6, 3, 5, 8, 120])
    alone = [greedy(engine, [prompt_ids], 20)[0] for prompt_ids in prompts]
    assert greedy(engine, prompts, 20, chunk=chunk) == alone


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.01)])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_narrow_formats_stay_close_to_float32(
    architecture: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    reference = make_reference(architecture, tmp_path)
    engine = open_engine(tmp_path, dtype=dtype)
    for prompt_ids in random_prompts([3, 50]):
        _, logits = reference_greedy(reference, prompt_ids, 1)
        found = first_logits(engine, prompt_ids)[:131].float()
        assert float((found - logits).abs().mean() / logits.std()) < tolerance
        assert min(greedy(engine, [prompt_ids], 5)[0]) >= 0
