"""What goes wrong in one request, or one step, stays there."""

from pathlib import Path

import pytest
import torch
from script_tools.recording_model import RecordingModel

from lightserve.errors import InvariantError
from lightserve.ipc.messages import StepPlan
from lightserve.model_worker.cpu import runner
from lightserve.model_worker.cpu.backend import CpuBackend
from lightserve.model_worker.cpu.memory import is_out_of_memory
from lightserve.model_worker.cpu.runner import CpuEngine, CpuModel
from lightserve.model_worker.kv_cache import KVCache
from lightserve.model_worker.models.llama import LlamaModel
from lightserve.sampling_params import SamplingParams
from tests.model_worker.references import make_reference
from tests.model_worker.tiny_engine import generate, greedy, open_engine, random_prompts

POISON = 100  # the id whose embedding is not a number
GREEDY = SamplingParams(8, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_reference("llama", folder)
    return folder


class CrampedModel(LlamaModel[CpuBackend]):
    """A model that runs out of memory on batches of more than ``max_tokens`` tokens."""

    def __init__(self, model: CpuModel, max_tokens: int) -> None:
        self.__dict__.update(model.__dict__)
        self.max_tokens = max_tokens
        self.num_failures = 0

    def forward(self, token_ids: torch.Tensor, kv_cache: KVCache, *, out: torch.Tensor) -> torch.Tensor:
        if len(token_ids) > self.max_tokens:
            self.num_failures += 1
            raise torch.OutOfMemoryError("no room")
        return super().forward(token_ids, kv_cache, out=out)


def poison(engine: CpuEngine) -> None:
    engine.runner.model._embedding[POISON] = float("nan")


def test_a_request_that_is_not_finite_fails_alone(folder: Path) -> None:
    prompts = [[token_id for token_id in prompt if token_id != POISON] for prompt in random_prompts([30, 4, 9])]
    expected = greedy(open_engine(folder), prompts, 8)
    engine = open_engine(folder)
    poison(engine)
    reqs = generate(engine, [prompts[0], [5, POISON, 6], prompts[1], prompts[2]], GREEDY)
    assert [reqs[i].output_ids for i in (0, 2, 3)] == expected
    assert reqs[1].output_ids[0] == -1


def test_slots_that_held_a_failed_request_serve_others(folder: Path) -> None:
    engine = open_engine(folder)
    prompts = random_prompts([3, 20, 5])
    slots = range(200)
    expected = [req.output_ids for req in generate(engine, prompts, GREEDY, slots=slots)]
    poison(engine)
    generate(engine, [[POISON] * 60, [POISON] * 60], GREEDY, slots=slots)
    assert [req.output_ids for req in generate(engine, prompts, GREEDY, slots=slots)] == expected


@pytest.mark.parametrize("max_tokens", [1, 3, 16])
def test_a_step_without_memory_is_run_in_pieces_says_so_and_gives_the_same(
    folder: Path, max_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = random_prompts([12, 3, 25])
    sampling = [GREEDY, SamplingParams(8, temperature=1.0, seed=3, presence_penalty=0.5), GREEDY]
    expected = [req.output_ids for req in generate(open_engine(folder), prompts, sampling)]
    engine = open_engine(folder)
    engine.runner.model = cramped = CrampedModel(engine.runner.model, max_tokens)
    assert [req.output_ids for req in generate(engine, prompts, sampling)] == expected
    said = [record.getMessage() for record in caplog.records]
    assert sum("out of memory" in line for line in said) == cramped.num_failures > 0


def test_an_allocation_that_fails_on_a_cpu_counts_as_out_of_memory(folder: Path) -> None:
    with pytest.raises(RuntimeError) as failure:
        torch.empty(1 << 60)
    assert is_out_of_memory(failure.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_a_step_that_samples_many_rows_is_run_in_pieces_and_gives_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = random_prompts([12, 3, 25, 6, 9])
    expected = greedy(open_engine(folder), prompts, 8)
    engine = open_engine(folder)
    monkeypatch.setattr(runner, "MAX_SAMPLED_AT_ONCE", 2)
    engine.runner.model = recording = RecordingModel(engine.runner.model)
    assert greedy(engine, prompts, 8) == expected
    assert max(len(logits) for logits in recording.recorded) <= 2
    assert "out of memory" not in caplog.text


def test_a_token_without_memory_ends_the_engine(folder: Path) -> None:
    engine = open_engine(folder)
    engine.runner.model = CrampedModel(engine.runner.model, 0)
    with pytest.raises(torch.OutOfMemoryError):
        greedy(engine, random_prompts([2]), 1)


def test_a_plan_without_tokens_gives_an_empty_result(folder: Path) -> None:
    engine = open_engine(folder)
    result = engine.step(StepPlan(9, b"", [], b"", b"", b"", b"", b"")).result()
    assert (result.step_id, result.token_ids, result.logprobs) == (9, b"", b"")


def test_releasing_a_free_row_is_refused(folder: Path) -> None:
    with pytest.raises(InvariantError):
        open_engine(folder).step(StepPlan(9, b"\0\0\0\0", [], b"", b"", b"", b"", b""))


def test_ids_without_text_are_never_sampled(folder: Path) -> None:
    engine = open_engine(folder, vocab_size=60)
    hot = SamplingParams(40, temperature=5.0, seed=1)
    sampled = [token_id for req in generate(engine, random_prompts([4, 4], 60), hot) for token_id in req.output_ids]
    assert max(sampled) < 60
    assert max(greedy(engine, random_prompts([4], 60), 40)[0]) < 60


def test_a_seeded_request_draws_the_same_ids_alone_in_a_crowd_and_again(folder: Path) -> None:
    engine = open_engine(folder)
    prompts = random_prompts([6, 6, 6])
    seeded = SamplingParams(16, temperature=1.5, top_p=0.95, seed=5)
    alone = generate(engine, prompts[:1], seeded)[0].output_ids
    others = [SamplingParams(16, temperature=1.5, seed=6), SamplingParams(16, temperature=0.0)]
    crowd = generate(engine, prompts, [seeded, *others], chunk=4)
    assert crowd[0].output_ids == alone
    assert generate(engine, [prompts[0]] * 2, [seeded, others[0]])[1].output_ids != alone
