"""The checks for GPUs, as far as a machine without one can run them."""

import os
import subprocess
from pathlib import Path

import pytest
from engine_bench.engine_host import open_engine
from gpu_check import Outcome, main, report, summarize
from gpu_checks import sanitizer_check
from gpu_checks.gpu_memory import used_mib, used_mib_of
from gpu_checks.memory_check import brim_lengths, fill_pool, run_largest_steps, slots_that_fit
from gpu_checks.pressure_check import press
from gpu_checks.ranks_check import compare_model, write_tiny
from gpu_checks.requirements import NotRunError
from gpu_checks.sanitizer_check import count_errors, kernels_named, sanitize
from gpu_checks.saturation_check import Sample, resident_mib, stays_constant
from hypothesis import given
from hypothesis import strategies as st

from lightserve.config import ServerConfig


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models"), (6, 1))


def config(model: Path, num_slots: int) -> ServerConfig:
    return ServerConfig(
        model_dir=str(model),
        dtype="float32",
        device="cpu",
        max_total_token_num=num_slots,
        running_max_req_size=32,
        chunked_prefill_size=128,
        disable_prefix_cache=True,
    )


def not_run() -> bool:
    raise NotRunError("needs two GPUs")


def broken() -> bool:
    raise ZeroDivisionError("in a check")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)


@pytest.mark.usefixtures("gpus")
def test_a_check_that_cannot_run_is_neither_passed_nor_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("ranks", not_run) is Outcome.NOT_RUN
    assert capsys.readouterr().out.startswith("needs two GPUs\n== ranks: NOT RUN")
    assert report("model", lambda: False) is Outcome.FAILED
    assert report("model", lambda: True) is Outcome.PASSED


@pytest.mark.usefixtures("gpus")
def test_a_check_that_breaks_has_failed_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("memory", broken) is Outcome.FAILED
    assert "ZeroDivisionError: in a check" in capsys.readouterr().err


def test_without_a_gpu_no_check_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    gguf = tmp_path / "any.gguf"
    gguf.touch()
    assert main(["--gguf", str(gguf)]) == 2
    assert capsys.readouterr().out.count("needs 1 GPU; there are 0") == 8


def test_the_exit_status_is_0_only_when_all_have_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert summarize({"a": Outcome.PASSED}) == 0
    assert summarize({"a": Outcome.PASSED, "b": Outcome.NOT_RUN}) == 2
    assert summarize({"a": Outcome.FAILED, "b": Outcome.NOT_RUN}) == 1
    assert capsys.readouterr().out.splitlines() == ["passed: a", "NOT RUN: b", "failed: a", "NOT RUN: b"]


@given(num_slots=st.integers(300, 100_000), num_rows=st.integers(2, 300), chunk=st.integers(2, 512))
def test_the_brims_requests_end_together_and_hold_every_slot(num_slots: int, num_rows: int, chunk: int) -> None:
    try:
        lengths = brim_lengths(num_slots, num_rows, chunk)
    except ValueError:
        assert chunk % 2 or chunk < 2 * num_rows or num_slots < num_rows * chunk
        return
    assert len(lengths) <= num_rows
    assert sum(length.num_slots for length in lengths) == num_slots
    per_step = chunk // lengths[0].prompt_len
    assert {i // per_step + length.output_len for i, length in enumerate(lengths)} == {lengths[0].output_len}
    assert max(length.prompt_len for length in lengths) <= chunk


def test_a_pool_of_the_usual_size_can_be_filled() -> None:
    assert len(brim_lengths(976_315, 1024, 8192)) > 1000


def test_every_slot_of_a_pool_is_in_use_at_once(tiny: Path) -> None:
    with open_engine(config(tiny, 2345)) as host:
        run_largest_steps(host)
        assert {len(ids) for ids in host.outputs} == {60, 4}
        assert fill_pool(host) == 2345


def test_a_refused_pool_names_the_number_that_fits(tiny: Path) -> None:
    assert 1000 < slots_that_fit(config(tiny, 1_000_000_000)) < 1_000_000_000


def test_requests_under_pressure_get_the_ids_they_get_alone(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert press(config(tiny, 800), 40)
    assert "40 complete, 40 with the ids they get alone" in capsys.readouterr().out


def test_a_pool_that_is_never_full_is_no_pressure(tiny: Path) -> None:
    assert not press(config(tiny, 8000), 3)


def test_two_ranks_give_the_ids_of_one(tiny: Path) -> None:
    assert compare_model(tiny, "cpu")


def test_errors_and_hazards_are_counted() -> None:
    assert count_errors("========= ERROR SUMMARY: 0 errors\n") == 0
    assert count_errors("========= ERROR SUMMARY: 1 error\n") == 1
    assert count_errors("========= RACECHECK SUMMARY: 12 hazards displayed (3 errors, 9 warnings)\n") == 12


def test_errors_are_told_by_kernel() -> None:
    output = (
        "========= Invalid __global__ read of size 2 bytes\n"
        "=========     at _merge_kernel+0x120 in merge.py:7\n"
        "=========     by thread (1,0,0) in block (0,0,0)\n"
        "========= Uninitialized __global__ memory read of size 4 bytes\n"
        "=========     at _merge_kernel+0x80\n"
        "=========     at void cublas::reduce<float, 4>(int)+0x10\n"
    )
    assert kernels_named(output) == {"_merge_kernel": 2, "void cublas::reduce<float, 4>(int)": 1}


@pytest.mark.parametrize("output", ["========= Error: Device not supported. \n", "Traceback\n", ""])
def test_a_sanitizer_that_does_not_work_has_found_nothing(output: str) -> None:
    with pytest.raises(NotRunError):
        count_errors(output)


def test_without_a_sanitizer_the_check_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitizer_check, "_CUDA_BIN", str(tmp_path))
    with pytest.raises(NotRunError, match="neither on PATH"):
        sanitize()


@pytest.mark.parametrize(
    ("memcheck", "is_clean"), [("ERROR SUMMARY: 3 errors", False), ("ERROR SUMMARY: 0 errors", None)]
)
def test_a_tool_that_breaks_hides_no_error_that_another_finds(
    memcheck: str, is_clean: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tour.py").write_text("")
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f'#!/bin/sh\ncase $2 in memcheck) echo "{memcheck}" ;; *) exit 137 ;; esac\n')
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sanitizer_check, "_TOUR", tmp_path / "tour.py")
    if is_clean is None:
        with pytest.raises(NotRunError, match="without a summary"):
            sanitize()
    else:
        assert sanitize() is is_clean


def samples(device_mib: list[int], host_mib: list[float], name: str = "router 7") -> list[Sample]:
    """One sample a minute."""
    pairs = zip(device_mib, host_mib, strict=True)
    return [Sample(60.0 * minute, device, {name: host}) for minute, (device, host) in enumerate(pairs)]


def test_memory_that_settles_within_the_first_minutes_is_constant() -> None:
    assert stays_constant(samples([900, 1000, 1016, 1008, 1000], [10.0, 70.0, 80.0, 81.0, 79.0]))


def test_a_device_that_fills_up_is_not_constant() -> None:
    assert not stays_constant(samples([1000, 1000, 1010, 1017, 1017], [80.0] * 5))


def test_a_process_that_grows_is_not_constant() -> None:
    assert not stays_constant(samples([1000] * 5, [80.0, 80.0, 80.0, 85.0, 90.0]))


def test_a_process_that_was_replaced_is_noticed() -> None:
    late = samples([1000] * 5, [80.0] * 5)
    assert not stays_constant([*samples([1000], [80.0], "router 8"), *late])


def test_too_few_samples_show_nothing() -> None:
    assert not stays_constant(samples([1000] * 3, [80.0] * 3))


def test_the_resident_memory_of_a_launcher_and_its_children_is_read() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & read line; kill $!"], stdin=subprocess.PIPE) as shell:
        while len(found := resident_mib(shell.pid)) < 2:
            pass
        shell.communicate(b"\n")
    assert {name.split()[0] for name in found} == {"sh", "sleep"}
    assert all(0 < mib < 100 for mib in found.values())


def answer_as_driver(monkeypatch: pytest.MonkeyPatch, folder: Path, cases: str) -> None:
    driver = folder / "nvidia-smi"
    driver.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\n')
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_memory_is_that_of_the_gpus_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_as_driver(monkeypatch, tmp_path, "*--id=1*) echo 30 ;; *) echo 12; echo 30 ;;")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert used_mib() == 42
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert used_mib() == 30


@pytest.mark.parametrize(("told", "mib"), [("7, 300", 300), ("7, [N/A]", 512), ("[N/A], 300", 512), ("6, 300", 512)])
def test_memory_of_processes_is_theirs_where_the_driver_tells(
    told: str, mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = f'*compute-apps*) echo "{told}"; echo "8, 200" ;; *) echo 512 ;;'
    answer_as_driver(monkeypatch, tmp_path, cases)
    assert used_mib_of([7, 9]) == mib
