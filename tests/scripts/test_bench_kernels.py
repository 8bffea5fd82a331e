"""Every case of the kernels' bench, checked at tiny sizes through the interpreter. Nothing is timed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

import bench_kernels
import pytest
import torch
from bench_kernels import KERNELS, check_and_time, exit_status, report
from kernel_bench.attention import DecodeBatch, PrefillBatch, decode_attention_cases, prefill_attention_cases
from kernel_bench.case import Case, worst
from kernel_bench.elementwise import embedding_cases, rms_norm_cases, rope_kv_write_cases, silu_mul_cases
from kernel_bench.products import Product, gated_gemm_cases, gemv_cases, skinny_gemm_cases
from kernel_bench.result import Ceilings, Result, Times, format_result, summarize
from kernel_bench.sampling import forbid_cases, greedy_cases, penalties_cases, sampling_cases
from kernel_bench.token_bookkeeping import commit_tokens_cases, copy_words_cases, place_tokens_cases
from script_tools.json_file import write_json
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tests.kernels.kit import DEVICE, TOLERANCE

HEADS = (4, 2)
PRODUCTS = (Product("plain", 70, 136), Product("gate_up", 80, 72, gated=True))
TINY: dict[str, Callable[[], Iterator[Case]]] = {
    "rms_norm": partial(rms_norm_cases, (1, 3), 40),
    "rope_kv_write": partial(rope_kv_write_cases, (1, 3), HEADS, 16, 7),
    "silu_mul": partial(silu_mul_cases, (1, 3), 40),
    "embedding": partial(embedding_cases, (3,), 11, 40),
    "decode_attention": partial(
        decode_attention_cases,
        batches=(DecodeBatch(2, 40), DecodeBatch(3, range(5, 90))),
        rotated=(DecodeBatch(1, 150), DecodeBatch(3, 20)),
        heads=HEADS,
        head_dims=(16,),
        num_slots=300,
    ),
    "prefill_attention": partial(
        prefill_attention_cases,
        # the first is long enough for its keys to be copied side by side
        batches=(PrefillBatch(1, 448), PrefillBatch(2, 9, 5), PrefillBatch(2, range(3, 9), range(30))),
        heads=(2, 1),
        head_dims=(16,),
        num_slots=600,
    ),
    "gemv": partial(gemv_cases, PRODUCTS),
    "skinny_gemm": partial(skinny_gemm_cases, PRODUCTS, (2, 5)),
    "gated_gemm": partial(gated_gemm_cases, PRODUCTS, (3, 130)),
    "greedy": partial(greedy_cases, (1, 3), 300),
    "sampling": partial(sampling_cases, (2,), 300),
    "penalties": partial(penalties_cases, (3,), 300),
    "forbid": partial(forbid_cases, (1, 3), 300, 8),
    "copy_words": partial(copy_words_cases, (3,)),
    "place_tokens": partial(place_tokens_cases, (1, 20), 7, 16),
    "commit_tokens": partial(commit_tokens_cases, (1, 3), 300),
}
CEILINGS = Ceilings(copy_tb_s=4.0, product_tflop_s=800.0)


def errors(name: str, device: torch.device) -> dict[str, float]:
    with device:
        return {case.name: case.error() for case in TINY[name]()}


def test_every_kernel_has_cases_of_tiny_sizes() -> None:
    assert list(TINY) == list(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_each_case_finds_its_kernel_right(name: str) -> None:
    found = errors(name, DEVICE)
    assert found
    assert {case: error for case, error in found.items() if not error <= TOLERANCE[torch.bfloat16]} == {}


@pytest.fixture
def kernels_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave every output as it was made: poisoned, not by chance what was right there before."""
    kinds: tuple[Any, ...] = (JITFunction, InterpretedFunction)
    for kind in kinds:
        monkeypatch.setattr(kind, "run", lambda *arguments, **options: None)
    torch.use_deterministic_algorithms(True)  # fills what is made empty with NaN or the largest integer
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("kernels_that_do_nothing")
@pytest.mark.parametrize("name", KERNELS)
def test_each_case_finds_a_kernel_wrong_that_does_nothing(name: str) -> None:
    found = errors(name, torch.device("cpu"))  # not every operation on a GPU has a deterministic form
    assert {case: error for case, error in found.items() if error <= 0.5} == {}


def test_the_worst_of_several_errors_is_the_largest() -> None:
    assert worst(0.1, 0.3, 0.2) == 0.3


@pytest.mark.parametrize("several", [(0.1, float("nan")), (float("nan"), 0.1)])
def test_no_error_is_worse_than_nan(several: tuple[float, ...]) -> None:
    assert isnan(worst(*several))


def result(error: float = 0.0, *, flops: float = 0.0, rivals_us: tuple[float, ...] = ()) -> Result:
    case = Case("some sizes", [], lambda: error, bytes=6e6, flops=flops)
    return summarize("some_kernel", case, error, Times([4.0, 2.0, 3.0], rivals_us), CEILINGS)


def test_a_result_is_the_median_between_the_smallest_and_the_largest() -> None:
    measured = result(rivals_us=(5.0, 9.0, 6.0))
    assert (measured.smallest_us, measured.time_us, measured.largest_us) == (2.0, 3.0, 4.0)
    assert (measured.rival_smallest_us, measured.rival_us, measured.rival_largest_us) == (5.0, 6.0, 9.0)


def test_a_rate_is_a_share_of_the_ceiling_that_limits_the_case() -> None:
    by_bytes, by_flops = result(), result(flops=1.2e9)
    assert (by_bytes.unit, by_flops.unit) == ("TB/s", "TFLOP/s")
    assert (by_bytes.rate, by_flops.rate) == pytest.approx((2.0, 400.0))
    assert (by_bytes.share, by_flops.share) == pytest.approx((0.5, 0.5))


def test_a_line_shows_sizes_error_time_rate_share_and_the_rival_if_there_is_one() -> None:
    line = "some_kernel        some sizes                   error 2.0e-03       3.0 µs    2.00 TB/s     50.0%"
    assert format_result(result(2e-3)) == line
    assert format_result(result(2e-3, rivals_us=(5.0,))) == f"{line}   cuBLAS 5.0 µs"


def test_every_case_is_checked_and_timed_and_all_of_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = {name: TINY[name] for name in ("silu_mul", "gemv")}
    with DEVICE:
        results = check_and_time(kernels, lambda case: Times([4.0, 2.0, 3.0], [5.0] * len(case.rival)), CEILINGS)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["silu_mul"] * 2 + ["gemv"] * 2
    write_json(tmp_path / "out.json", report(["silu_mul", "gemv"], "some GPU", CEILINGS, 3, results))
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["command"], written["device"]) == ("bench_kernels.py silu_mul gemv", "some GPU")
    assert (written["copy_tb_s"], written["product_tflop_s"], written["repeats"]) == (4.0, 800.0, 3)
    assert written["results"] == [asdict(result) for result in results]
    assert [row["case"] for row in written["results"]] == ["1 x 40", "3 x 40", "plain, m = 1", "gate_up, m = 1"]


@pytest.mark.parametrize(("error", "status"), [(0.0, 0), (0.011, 1), (float("nan"), 1)])
def test_a_kernel_that_errs_is_named_and_changes_the_exit_status(
    error: float, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status([result(), result(error)]) == status
    assert capsys.readouterr().err.count("WRONG: some_kernel some sizes") == status


@pytest.mark.parametrize("arguments", [["no_such_kernel"], ["all", "--repeats", "0"], []])
def test_arguments_that_ask_for_nothing_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench_kernels.main(arguments)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_kernels.main(["all"]) == 1
    assert "no CUDA device" in capsys.readouterr().err
