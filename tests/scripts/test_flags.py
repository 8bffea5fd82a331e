"""What the scripts refuse, before they measure or write anything."""

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_engine
import bench_front_end
import bench_kernels
import bench_loading
import bench_model
import bench_router
import bench_table
import benchmark_sharegpt
import check_against_transformers
import gpu_check
import metronome_server
import plot_trace
import pytest
import simulate_router
from script_tools import flags

SCRIPTS = {
    script.__name__: script
    for script in (
        *(bench_engine, bench_front_end, bench_kernels, bench_loading, bench_model, bench_router, bench_table),
        *(benchmark_sharegpt, check_against_transformers, gpu_check, metronome_server, plot_trace, simulate_router),
    )
}
PRESET = str(Path(bench_model.__file__).parent / "presets" / "llama-3.2-1b")
# What each needs beside the flag that is wrong.
REQUIRED = {
    "bench_kernels": ["greedy"],
    "bench_loading": ["--model_dir", PRESET, "--folder", "new"],
    "bench_model": ["--model_dir", PRESET, "--decodes", "1"],
    "bench_table": ["--only", "1b"],
    "benchmark_sharegpt": ["--prompt_len", "5", "--output_len", "5"],
    "plot_trace": ["good.csv", "--out", "picture.png"],
    "simulate_router": ["--trace", "good.csv", "--max_total_token_num", "1000"],
}
WRONG = """
simulate_router --max_concurrency -1
simulate_router --max_concurrency 0
simulate_router --num_requests 0
simulate_router --max_new_tokens 0
simulate_router --max_total_token_num 0
simulate_router --running_max_req_size 0
simulate_router --chunked_prefill_size 0
simulate_router --seed -1
simulate_router --max_overflow_prob 5
simulate_router --max_overflow_prob 0
simulate_router --speedup 0
simulate_router --speedup nan
simulate_router --max_itl_ms -1
simulate_router --request_rate 0
simulate_router --ttft_limit_ms nan
simulate_router --step_model nowhere.json
simulate_router --step_model good.csv
simulate_router --step_model timeless.json
simulate_router --step_model negative.json
simulate_router --trace nowhere.csv
simulate_router --trace empty.csv
simulate_router --trace huge.csv
simulate_router --plot picture.txt
bench_router --rows -1
bench_router --rows 0
bench_router --rows 8,
bench_router --steps 0
bench_front_end --num_streams 0
bench_front_end --tokens_per_s 0
bench_front_end --seconds inf
bench_front_end --client_processes 0
bench_engine --output_lens 5,5
bench_engine --output_lens 5
bench_engine --repeats 0
bench_engine --trace nowhere.csv
bench_engine --trace empty.csv
bench_engine --profile_dir nowhere
bench_kernels --repeats 0
bench_loading --model_dir nowhere
bench_loading --folder good.csv
bench_loading --file_gb 0
bench_loading --tp 7
bench_model --model_dir nowhere
bench_model --context 0
bench_table --repeats 0
benchmark_sharegpt --num_warmups -1
benchmark_sharegpt --max_failed_frac nan
benchmark_sharegpt --max_failed_frac 1.5
benchmark_sharegpt --seed -1
benchmark_sharegpt --temperature -1
benchmark_sharegpt --timeout_s inf
gpu_check --num_requests 0
gpu_check --minutes nan
gpu_check --trace nowhere.csv
metronome_server --port 70000
metronome_server --interval_s 0
plot_trace --steps 0
plot_trace --last_kernel (
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with some files in it."""
    monkeypatch.chdir(tmp_path)
    Path("good.csv").write_text("prompt_len,output_len\n5,5\n")
    Path("empty.csv").write_text("prompt_len,output_len\n0,5\n")
    Path("huge.csv").write_text(f"prompt_len,output_len\n5,5\n{10**15},5\n")
    model = '{{"note": "", "launch_s": {0}, "weights_s": 0, "token_s": 0, "context_token_s": 0, "prompt_pair_s": 1}}'
    Path("timeless.json").write_text(model.format(0))
    Path("negative.json").write_text(model.format(-1))
    return tmp_path


@pytest.mark.parametrize("line", WRONG.split("\n")[1:-1])
def test_a_wrong_value_is_refused_by_flag_and_value(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, flag, value = line.split()
    files = {*folder.iterdir()}
    with pytest.raises(SystemExit) as exit_info:
        SCRIPTS[script].main([*REQUIRED.get(script, []), flag, value])
    assert exit_info.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in message
    assert flag in message
    assert value.strip(",") in message
    assert {*folder.iterdir()} == files


@pytest.mark.parametrize("path", ["nowhere/out.json", ".", ""])
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name.startswith(("bench", "simulate"))])
def test_a_result_that_could_not_be_written_is_refused(
    script: str, path: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        SCRIPTS[script].main([*REQUIRED.get(script, []), "--json", path])
    assert exit_info.value.code == 2
    assert f"argument --json: {path!r}" in capsys.readouterr().err


def test_an_engine_without_a_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_engine.main(["--model_dir", "/nonexistent", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "bench_engine.py: --model_dir /nonexistent: no such file or folder\n"


def test_a_simulation_in_which_every_request_fails_says_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_router.main(["--trace", "good.csv", "--max_total_token_num", "8"]) == 2
    assert "can never fit max_total_token_num (8)" in capsys.readouterr().err


def test_a_simulation_too_large_for_the_memory_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def allocate(*_: object) -> None:
        raise MemoryError("unable to allocate 16 GiB")

    monkeypatch.setattr(simulate_router, "Simulation", allocate)
    assert simulate_router.main(["--trace", "good.csv", "--max_total_token_num", "2147483647"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "simulate_router.py: too little memory for so large a pool, batch or trace: unable to allocate 16 GiB"
    ]


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (flags.positive_int, "1", 1),
        (flags.non_negative_int, "0", 0),
        (flags.positive_ints, "1,8", [1, 8]),
        (flags.port, "0", 0),
        (flags.positive_float, "0.5", 0.5),
        (flags.non_negative_float, "0", 0.0),
        (flags.rate, "inf", float("inf")),
        (flags.fraction, "1", 1.0),
    ],
)
def test_a_bound_itself_is_taken(read: Callable[[str], Any], text: str, value: Any) -> None:
    assert read(text) == value


@pytest.mark.parametrize("read", [flags.positive_int, flags.positive_float, flags.fraction, flags.rate])
@pytest.mark.parametrize("text", ["", "many", "nan", "-1"])
def test_what_is_no_number_is_refused(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"not {text!r}"):
        read(text)


def test_an_integer_beyond_32_bits_is_refused() -> None:
    assert flags.positive_int("2147483647") == 2**31 - 1
    with pytest.raises(argparse.ArgumentTypeError, match="not '2147483648'"):
        flags.positive_int("2147483648")


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (check_against_transformers, [], "needs transformers and accelerate: pip install transformers accelerate"),
        (
            simulate_router,
            [*REQUIRED["simulate_router"], "--plot", "a.png"],
            "--plot needs matplotlib: pip install matplotlib",
        ),
        (plot_trace, REQUIRED["plot_trace"], "needs matplotlib: pip install matplotlib"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_how_to_install_it(
    script: Any,
    arguments: list[str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    try:
        status = script.main(arguments)
    except SystemExit as exit_info:
        status = exit_info.code
    assert status == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)
