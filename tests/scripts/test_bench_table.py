"""The table of figures, and what fills it, as far as a machine without a GPU can."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import bench_table
import msgspec
import pytest
import torch
from engine_bench.engine_figures import EngineRuns, measure_engine
from engine_bench.engine_host import EngineError
from engine_bench.result_table import Figure, Measured, Target, table_row
from engine_bench.server_figures import (
    FIRST_START,
    LATER_START,
    FailedRequestsError,
    Load,
    MissingFigureError,
    measure_loads,
    measure_server,
)
from script_tools.load_generator import send_load
from script_tools.running_server import Server, running_server

from lightserve.config import ServerConfig
from tests.scripts.fake_server import CHUNKED, END, FakeServer, Steps, chunk, event, in_a_thread, json_reply

RATE, TIME = Target("req/s", 79, 65), Target("ms", None, 4.3)
SURROUNDINGS = {
    "date": "2026-11-30",
    "command": "bench_table.py --trace 'my lengths.csv'",
    "commit": "abc1234",
    "gpu": "some GPU",
    "versions": {"torch": "2.11.0"},
}
TINY = ("--load_format", "dummy", "--device", "cpu", "--dtype", "float32", "--max_total_token_num", "2000")


def token(count: int, *, finished: bool = False) -> bytes:
    body = {"token": {"text": " a", "count_output_tokens": count, "prompt_tokens": 5}, "finished": finished}
    return chunk(event(body))


ANSWER: Steps = [CHUNKED, token(1), 0.01, token(2), 0.01, token(3, finished=True), END]


def test_a_rate_should_be_high_and_a_time_low() -> None:
    assert [RATE.is_met(value) for value in (64.9, 65, 65.1)] == [False, True, True]
    assert [TIME.is_met(value) for value in (4.2, 4.3, 4.31)] == [True, True, False]
    assert Target("tokens/s", floor=285).is_met(1.0) is None


def test_a_row_shows_the_median_between_the_smallest_and_the_largest() -> None:
    row = table_row(Figure("at once", [64.1, 70.0, 66.44]), RATE)
    assert row == "| at once, req/s | 79 | 65 | 66.44 | 64.10 | 70.00 | yes |"


def test_a_row_has_no_range_of_one_run_and_says_nothing_of_a_goal_that_is_not() -> None:
    assert table_row(Figure("start", [11.5]), Target("s")) == "| start, s |  |  | 11.50 |  |  |  |"


def test_a_value_that_just_misses_its_goal_does_not_look_like_it() -> None:
    assert table_row(Figure("step", [4.303]), TIME) == "| step, ms |  | 4.3 | 4.303 |  |  | no |"


def test_every_figure_has_a_target_and_every_target_a_figure() -> None:
    loads = bench_table.server_loads(Path("lengths.csv"))
    engines = bench_table.ENGINES.values()
    names = [
        *(FIRST_START, LATER_START),
        *(what for load in loads for what in load.figures),
        *(name for runs in engines for name in map(runs.decode_name, runs.batches)),
        *(name for runs in engines for name in map(runs.prefill_name, runs.prefill_lens)),
    ]
    assert sorted(names) == sorted(bench_table.TARGETS)


def test_a_row_is_printed_and_written_before_the_next_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.json"

    def part() -> Iterator[Measured]:
        yield Measured([Figure("rate", [60.0, 62.0, 61.0])], "first report")
        assert capsys.readouterr().out.splitlines()[-1] == "| rate, req/s | 79 | 65 | 61.00 | 60.00 | 62.00 | no |"
        assert msgspec.json.decode(path.read_bytes())["reports"] == {"a": ["first report"]}
        yield Measured([Figure("time", [4.0])], "second report")

    # A goal that is missed is no failure.
    assert bench_table.measure_table({"a": part()}, {"rate": RATE, "time": TIME}, SURROUNDINGS, path) == 0
    assert capsys.readouterr().out == "| time, ms |  | 4.3 | 4.000 |  |  | yes |\n"
    written = msgspec.json.decode(path.read_bytes())
    assert written["rows"][0] == {
        "what": "rate",
        "unit": "req/s",
        "floor": 79,
        "goal": 65,
        "values": [60.0, 62.0, 61.0],
        "median": 61.0,
        "goal_met": False,
    }
    assert written["commit"] == "abc1234"
    assert written["failed"] == {}


def test_a_part_that_fails_leaves_its_rows_and_the_other_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Iterator[Measured]:
        yield Measured([Figure("rate", [70.0])], None)
        raise EngineError("a worker ended")

    path = tmp_path / "all.json"
    parts = {"server": broken(), "8b": iter([Measured([Figure("time", [4.0])], None)])}
    assert bench_table.measure_table(parts, {"rate": RATE, "time": TIME}, SURROUNDINGS, path) == 1
    printed = capsys.readouterr()
    assert [line.split(",")[0] for line in printed.out.splitlines()[-2:]] == ["| rate", "| time"]
    assert printed.err == "bench_table.py: server: a worker ended\n"
    assert msgspec.json.decode(path.read_bytes())["failed"] == {"server": "a worker ended"}


def test_a_file_that_cannot_be_written_costs_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all.json"
    path.mkdir()
    parts = {name: iter([Measured([Figure("rate", [70.0])], name)]) for name in ("server", "8b")}
    assert bench_table.measure_table(parts, {"rate": RATE}, SURROUNDINGS, path) == 1
    printed = capsys.readouterr()
    assert [line.split(",")[0] for line in printed.out.splitlines()[-2:]] == ["| rate", "| rate"]
    assert printed.err.count(f"bench_table.py: --json {path}: ") == 2


def test_a_file_that_can_be_written_in_the_end_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.mkdir()

    def part() -> Iterator[Measured]:
        yield Measured([Figure("rate", [70.0])], "first")
        path.rmdir()
        yield Measured([Figure("rate", [71.0])], "second")

    assert bench_table.measure_table({"server": part()}, {"rate": RATE}, SURROUNDINGS, path) == 0
    written = msgspec.json.decode(path.read_bytes())
    assert (written["reports"], written["failed"]) == ({"server": ["first", "second"]}, {})


def test_a_figure_that_is_not_in_a_report_costs_no_other() -> None:
    one_token: Steps = [CHUNKED, token(1, finished=True), END]
    server = FakeServer(lambda _: one_token)
    few = ["--prompt_len", "5", "--output_len", "1", "--num_prompts", "2"]
    loads = [
        Load(few, {"per token": ["tpot_ms", "p50"], "first": ["ttft_ms", "p50"]}),
        Load(few, {"rate": ["request_throughput"]}),
    ]
    with in_a_thread(server) as url:
        measured = measure_loads(url, loads, 1)
        assert [[figure.what for figure in next(measured).figures] for _ in loads] == [["first"], ["rate"]]
        with pytest.raises(MissingFigureError, match="per token"):
            next(measured)


def test_before_the_table_stands_what_makes_it_reproducible(capsys: pytest.CaptureFixture[str]) -> None:
    bench_table.measure_table({}, {}, SURROUNDINGS, None)
    assert capsys.readouterr().out.splitlines()[:4] == [
        "`bench_table.py --trace 'my lengths.csv'`",
        "",
        "some GPU, commit abc1234, 2026-11-30; torch 2.11.0",
        "",
    ]


def test_no_two_runs_send_prompts_that_begin_alike() -> None:
    server = FakeServer(lambda _: ANSWER)
    few = ["--output_len", "3", "--num_prompts", "2", "--max_concurrency", "1"]
    loads = [
        Load([*few, "--prompt_len", "40"], {"rate": ["request_throughput"]}),
        Load([*few, "--prompt_len", "30"], {"p50": ["tpot_ms", "p50"], "p99": ["itl_ms", "p99"]}),
    ]
    with in_a_thread(server) as url:
        first, second = measure_loads(url, loads, 2)
    assert [figure.what for figure in (*first.figures, *second.figures)] == ["rate", "p50", "p99"]
    results = [report["results"] for report in second.report]
    assert len(results) == len(first.report) == 2
    assert [figure.values for figure in second.figures] == [
        [result["tpot_ms"]["p50"] for result in results],
        [result["itl_ms"]["p99"] for result in results],
    ]
    prompts = [body["inputs"] for body in server.bodies]
    assert len({str(prompt[:4]) for prompt in prompts}) == len(prompts) == 8


def test_a_load_with_a_failed_request_has_no_figures() -> None:
    refusal: Steps = [json_reply({"error": {"message": "queue is full"}}, "429 Too Many Requests")]
    server = FakeServer(lambda number: refusal if number == 3 else ANSWER)
    flags = ["--prompt_len", "5", "--output_len", "3", "--num_prompts", "4", "--max_concurrency", "1"]
    with in_a_thread(server) as url, pytest.raises(FailedRequestsError, match=r"http_429.*queue is full"):
        list(measure_loads(url, [Load(flags, {"rate": ["request_throughput"]})], 1))


def test_a_load_that_cannot_be_made_leaves_no_report_of_an_earlier_one(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text("{}")
    with pytest.raises(subprocess.CalledProcessError):
        send_load("http://127.0.0.1:1", ["--prompt_len", "5", "--output_len", "3"], report)


def test_the_second_start_finds_what_the_first_has_compiled() -> None:
    found: list[list[str]] = []
    folders: list[Path] = []

    @contextmanager
    def start(flags: Sequence[str], environment: Mapping[str, str]) -> Iterator[Server]:
        folders.append(Path(environment["TRITON_CACHE_DIR"]))
        found.append([path.name for path in folders[-1].iterdir()])
        (folders[-1] / "kernel").touch()
        yield Server("http://127.0.0.1:1", 1, 10.0 / len(found))

    starts = measure_server([], [], 3, start=start)
    assert [list(start.figures) for start in starts] == [[Figure(FIRST_START, [10.0])], [Figure(LATER_START, [5.0])]]
    assert found == [[], ["kernel"]]
    assert not folders[0].exists()


def test_a_whole_server_is_started_and_loaded(model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt_len", "20", "--output_len", "8", "--num_prompts", "3"]
    load = Load(flags, {"tokens": ["output_throughput"], "first": ["ttft_ms", "p50"]})
    with running_server(["--model_dir", str(model_dir), *TINY]) as server:
        (measured,) = measure_loads(server.url, [load], 2)
    assert server.start_s > 0.5
    assert all(value > 0 for figure in measured.figures for value in figure.values)
    assert measured.report[0]["results"]["output_tokens"] == 24
    printed = capfd.readouterr()
    assert printed.out == ""  # what the server says does not stand in the table
    assert "lightserve is ready" in printed.err


def test_an_engines_steps_are_timed(model_dir: Path) -> None:
    config = ServerConfig(
        model_dir=str(model_dir), load_format="dummy", device="cpu", dtype="float32", max_total_token_num=2000
    )
    start, one, three, prompt, stats = measure_engine(EngineRuns("Tiny", config, 16, (1, 3), (1200,)), 2)
    assert start.report["num_slots"] == 2000
    assert [figure.what for measured in (one, three, prompt) for figure in measured.figures] == [
        "Tiny decode, prompts of 16, batch 1",
        "Tiny decode, prompts of 16, batch 3",
        "Tiny prefill, 1,200 tokens",
    ]
    assert all(len(measured.figures[0].values) == 2 for measured in (one, three, prompt))
    assert min(prompt.figures[0].values) > 0
    assert prompt.report.ms == pytest.approx(prompt.figures[0].median)
    assert stats.report.num_steps > 4 * (16 + 144)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_table.main(["--only", "8b"]) == 1
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the server needs --trace"),
        (["--only", "1b,server"], "the server needs --trace"),
        (["--only", "70b"], "no such part: 70b"),
        (["--only", "8b", "--repeats", "0"], "argument --repeats: must be an integer from 1"),
        (["--trace", "short.csv"], "has only 2 requests"),
        (["--trace", "nowhere.csv"], "No such file"),
        (["--trace", "other.csv"], "known are prompt_len"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.csv").write_text("prompt_len,output_len\n5,5\n6,6\n")
    Path("other.csv").write_text("name\nx\n")
    with pytest.raises(SystemExit):
        bench_table.main(arguments)
    assert message in capsys.readouterr().err
