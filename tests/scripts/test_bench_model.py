"""Steps of the model by themselves, as far as a machine without a GPU can time them."""

from collections.abc import Sequence
from pathlib import Path

import bench_model
import pytest
import torch
from bench_model import Step
from engine_bench.model_steps import KernelShare, ModelSteps, kernel_shares

from tests.model_worker.references import make_reference
from tests.model_worker.tiny_cuda import PlainCapturer, make_blueprint
from tests.model_worker.tiny_engine import NUM_SLOTS

PRESET = str(Path(bench_model.__file__).parent / "presets" / "llama-3.2-1b")


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> ModelSteps:
    """Steps of a tiny model; few kernels are interpreted in a second."""
    folder = tmp_path_factory.mktemp("model")
    make_reference("llama", folder)
    with torch.inference_mode():
        return ModelSteps(make_blueprint(folder), NUM_SLOTS, PlainCapturer())


def test_a_step_is_timed_in_the_shape_that_an_engine_would_give_it(steps: ModelSteps) -> None:
    with torch.inference_mode():
        decode, mixed = steps.time(3, 20, num_replays=1), steps.time(2, 20, [9], num_replays=1)
    assert (decode.num_tokens, mixed.num_tokens) == (4, 16)
    assert decode.ms > 0
    assert mixed.ms > 0


def test_times_to_the_next_start_add_up_to_the_span() -> None:
    events = [(0.0, 5.0, "a"), (3.0, 9.0, "b"), (10.0, 12.0, "a"), (11.0, 20.0, "b")]
    first, second = kernel_shares(events, num_steps=2)
    assert (first.name, first.count, first.until_next_us, first.duration_us) == ("b", 1.0, 8.0, 7.5)
    assert (second.name, second.count, second.until_next_us, second.duration_us) == ("a", 1.0, 2.0, 3.5)
    assert kernel_shares([], num_steps=1) == []


def test_steps_are_read_from_the_command_line() -> None:
    assert bench_model._steps("1,3+100+50") == [Step(1, []), Step(3, [100, 50])]


def test_there_is_room_for_every_step_that_is_timed_or_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoSteps:
        def kernels(self, num_decode: int, context: int, chunk_lens: Sequence[int]) -> list[KernelShare]:
            return []

    room: list[int] = []

    def open_steps(model_dir: Path, num_rows: int, max_tokens: int) -> NoSteps:
        room.extend((num_rows, max_tokens))
        return NoSteps()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_model, "_open", open_steps)
    assert bench_model.main(["--model_dir", PRESET, "--kernels", "4,300+100+8192"]) == 0
    assert room == [302, 8592]
    assert bench_model.room_for([Step(4)]) == (256, 8192)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing to time"),
        (["--decodes", "1", "--context", "8193"], "--context must be from 1 to 8192"),
        (["--mixed", "1+5,1+8193"], "--mixed 1+8193: a prompt has from 1 to 8192 tokens"),
        (["--kernels", "1+0"], "--kernels 1+0: a prompt"),
        (["--decodes", "200001"], "--decodes 200001: a step has from 1 to 200000 tokens"),
        (["--kernels", "0"], "--kernels 0: a step"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_flag(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_model.main(["--model_dir", PRESET, *flags])
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_model.main(["--model_dir", PRESET, "--decodes", "1"]) == 1
    assert "no CUDA device" in capsys.readouterr().err
