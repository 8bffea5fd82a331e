"""The GPU's engine against the CPU's on tiny models, in float32; without a GPU its kernels are interpreted."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lightserve.ipc.messages import NewReq, StepPlan, pack_int32, unpack_int32
from lightserve.model_worker.cuda.runner import CudaRunner
from lightserve.model_worker.cuda.step_inputs import ForwardShape, SampleShape, Sampling
from lightserve.model_worker.engine import Engine
from lightserve.model_worker.host_batch import HostBatch
from lightserve.model_worker.sampling_rows import SamplingRows
from lightserve.sampling_params import SamplingParams
from tests.model_worker.references import make_reference
from tests.model_worker.tiny_checkpoint import write_checkpoint
from tests.model_worker.tiny_cuda import make_blueprint, open_cuda_engine
from tests.model_worker.tiny_engine import NUM_SLOTS, generate, open_engine, random_prompts

# Interpreting is slow: a GPU takes more of everything.
ON_GPU = torch.cuda.is_available()
NUM_LAYERS, NUM_TOKENS = (4, 24) if ON_GPU else (1, 3)
LENGTHS = (1, 5, 17, 3, 2, 150, 40, 66) if ON_GPU else (1, 5, 17, 3, 2)
GREEDY = SamplingParams(NUM_TOKENS, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, num_hidden_layers=NUM_LAYERS)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine[CudaRunner]:
    return open_cuda_engine(folder, graphs=False)


@pytest.mark.parametrize("chunk", [7])
def test_greedy_ids_and_logprobs_equal_the_cpus(folder: Path, engine: Engine[CudaRunner], chunk: int) -> None:
    prompts = random_prompts(LENGTHS)
    expected = generate(open_engine(folder), prompts, GREEDY)
    for req, reference in zip(generate(engine, prompts, GREEDY, chunk=chunk), expected, strict=True):
        assert req.output_ids == reference.output_ids
        assert req.logprobs == pytest.approx(reference.logprobs, abs=1e-3)


SAMPLING = [
    SamplingParams(NUM_TOKENS, temperature=1.0, seed=3, top_p=0.9),
    SamplingParams(NUM_TOKENS, temperature=1.5, seed=(1 << 62) + 5, top_k=7, min_p=0.05),
    SamplingParams(NUM_TOKENS, temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(NUM_TOKENS, temperature=0.0, min_new_tokens=2, stop_token_ids=tuple(range(3, 67))),
    GREEDY,
]


@pytest.mark.parametrize("picked", [[0, 4], [0, 1, 2, 3, 4]])
def test_sampled_ids_equal_the_cpus(folder: Path, engine: Engine[CudaRunner], picked: list[int]) -> None:
    prompts, sampling = random_prompts(LENGTHS[: len(picked)]), [SAMPLING[i] for i in picked]
    expected = generate(open_engine(folder), prompts, sampling)
    found = generate(engine, prompts, sampling, chunk=9)
    assert [req.output_ids for req in found] == [req.output_ids for req in expected]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_biases_and_head_norms_equal_the_cpus(architecture: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, tie_word_embeddings=True, num_hidden_layers=NUM_LAYERS)
    prompts = random_prompts([4, 9])
    expected = generate(open_engine(tmp_path), prompts, GREEDY)
    found = generate(open_cuda_engine(tmp_path, graphs=False), prompts, GREEDY)
    assert [req.output_ids for req in found] == [req.output_ids for req in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_the_ids_that_launches_one_by_one_give(folder: Path, dtype: torch.dtype) -> None:
    prompts = random_prompts([2, 13])
    launching, captured = (open_cuda_engine(folder, graphs=graphs, dtype=dtype) for graphs in (False, True))
    for sampling in (GREEDY, SAMPLING[2]):
        expected = generate(launching, prompts, sampling, chunk=11)
        found = generate(captured, prompts, sampling, chunk=11)
        for req, reference in zip(found, expected, strict=True):
            assert req.output_ids == reference.output_ids
            assert req.logprobs == pytest.approx(reference.logprobs, abs=1e-4)


def test_ids_without_text_are_never_sampled(folder: Path) -> None:
    engine = open_cuda_engine(folder, graphs=False, vocab_size=60)
    hot = SamplingParams(4, temperature=5.0, seed=1)
    sampled = [token_id for req in generate(engine, random_prompts([4, 4], 60), hot) for token_id in req.output_ids]
    assert max(sampled) < 60


def test_a_steps_result_outlives_the_launch_of_the_next(folder: Path) -> None:
    engine, (prompt,) = open_cuda_engine(folder, graphs=False), random_prompts([3])
    expected = generate(open_engine(folder), [prompt], SamplingParams(2, temperature=0.0))[0].output_ids
    row, new = pack_int32([0]), NewReq(0, pack_int32(prompt), 3, b"", GREEDY)
    first = engine.step(StepPlan(0, b"", [new], b"", row, pack_int32([0]), pack_int32([3]), pack_int32([4, 5, 6])))
    second = engine.step(StepPlan(1, b"", [], row, b"", b"", b"", pack_int32([7])))
    assert [unpack_int32(step.result().token_ids).tolist() for step in (first, second)] == [[i] for i in expected]


@torch.inference_mode()
def test_empty_launches_touch_no_request_whatever_ran_before(folder: Path) -> None:
    blueprint = make_blueprint(folder)
    step, inputs, rows = blueprint.build_step(NUM_SLOTS)
    params = SamplingRows(blueprint.num_rows, blueprint.config.eos_token_ids)
    runner = CudaRunner(step, inputs, rows, params, blueprint.shapes, None)
    for step_id in range(2):  # so that the words of both steps in flight are no zeros
        runner.run(step_id, blueprint.largest_batch(NUM_SLOTS)).result()
    state = [*step.kv_cache.layers, rows.req_to_slots, rows.next_token]
    for tensor in state:
        tensor.fill_(7)
    for shape in (*blueprint.shapes.largest[:2], SampleShape(1, Sampling.GREEDY)):
        runner.launch_empty(shape)
    assert all((tensor[1:] == 7).all() for tensor in state)  # all but slot 0 and row 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, on NaN
@torch.inference_mode()
def test_a_request_that_is_not_finite_fails_alone_and_leaves_nothing_behind(folder: Path) -> None:
    prompts, poisoned = random_prompts([9, 2, 4], vocab_size=100), 110
    blueprint = make_blueprint(folder, dtype=torch.bfloat16)
    engine = blueprint.build(NUM_SLOTS, None)
    expected = [req.output_ids for req in generate(engine, prompts, GREEDY, slots=range(NUM_SLOTS))]
    blueprint.model._embedding[poisoned] = float("nan")
    reqs = generate(engine, [*prompts, [5, poisoned, 6]], GREEDY, slots=range(NUM_SLOTS))
    assert [req.output_ids for req in reqs[:3]] == expected
    assert reqs[3].output_ids[0] == -1
    generate(engine, [[poisoned] * 20] * 2, GREEDY, slots=range(NUM_SLOTS))
    assert [req.output_ids for req in generate(engine, prompts, GREEDY, slots=range(NUM_SLOTS))] == expected


@pytest.fixture
def no_luck() -> Iterator[None]:
    """Fill what is made empty with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("no_luck")
@torch.inference_mode()
def test_rows_that_pad_a_mixed_step_stay_finite(folder: Path) -> None:
    blueprint = make_blueprint(folder)
    step, inputs, _ = blueprint.build_step(NUM_SLOTS)
    words, shape = torch.zeros(inputs.num_words, dtype=torch.int32), ForwardShape(16, 1, 64)
    words = words.pin_memory() if ON_GPU else words
    row, ids = np.zeros(1, dtype=np.int32), np.arange(3, dtype=np.int32)
    prompt = HostBatch(
        0, req_rows=row, starts=row, extend_lens=row + 3, is_sampled=row > 0, token_ids=ids, out_slots=ids
    )
    inputs.copy(words, inputs.base, inputs.stage_forward(words.numpy(), prompt, shape))
    step.forward(shape)
    assert step._hidden[:16].isfinite().all()


def test_first_ids_in_bfloat16_are_likely_in_float32(tmp_path: Path) -> None:
    model = make_reference("qwen2", tmp_path)
    prompts, first = random_prompts(LENGTHS), SamplingParams(1, temperature=0.0)
    engine = open_cuda_engine(tmp_path, graphs=False, dtype=torch.bfloat16)
    for req in generate(engine, prompts, first, chunk=7):
        with torch.inference_mode():
            logprobs = model(torch.tensor([req.prompt_ids])).logits[0, -1].log_softmax(-1)
        found = float(logprobs[req.output_ids[0]])
        assert found >= float(logprobs.max()) - 0.1  # the likeliest two of a prompt may be 0.015 apart
        assert req.logprobs == pytest.approx([found], abs=0.1)
