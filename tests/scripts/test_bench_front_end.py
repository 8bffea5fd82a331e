import json
import os
import signal
import subprocess
import sys
from array import array
from pathlib import Path

import bench_front_end
import numpy as np
import pytest
from benchmark.messages import Outcome
from front_end_bench.cpu_times import children_of, core_frac
from front_end_bench.scenario import make_scenario
from front_end_bench.steady_window import NoWindowError, Window, full_window, measure_delivery
from front_end_bench.worker_process import RandomIds

from tests.server import is_alive, wait_until

SCRIPT = str(Path(bench_front_end.__file__))


def outcome(times: list[float], usage: list[float]) -> Outcome:
    """A stream whose reads came at these times, each with the tokens so far."""
    raw_times, raw_usage = array("d", times).tobytes(), array("d", usage).tobytes()
    events = array("d", np.diff(usage, prepend=0)).tobytes()
    last = round(usage[-1]) if usage else 0
    return Outcome(0, 0.0, 99.0, None, "", last, 1, True, raw_times, events, raw_usage)


def test_the_window_opens_when_the_last_stream_begins_and_closes_when_the_first_ends() -> None:
    outcomes = [outcome([1.0, 6.0], [1, 2]), outcome([3.0, 5.0], [1, 2]), outcome([2.0, 9.0], [1, 2]), outcome([], [])]
    assert full_window(outcomes, num_full=3) == Window(3.0, 5.0)


def test_a_dip_between_two_streams_does_not_end_the_window() -> None:
    outcomes = [outcome([1.0, 2.0], [1, 2]), outcome([3.0, 4.0], [1, 2])]
    assert full_window(outcomes, num_full=1) == Window(1.0, 4.0)


def test_there_is_no_window_when_the_batch_was_never_full() -> None:
    with pytest.raises(NoWindowError):
        full_window([outcome([1.0, 2.0], [1, 2]), outcome([3.0, 4.0], [1, 2])], num_full=2)


def test_what_comes_within_the_window_counts_and_its_gaps_do() -> None:
    early, late = outcome([0.0, 1.0, 2.0, 4.0], [1, 2, 3, 7]), outcome([1.5, 2.5, 9.0], [1, 2, 3])
    delivery = measure_delivery([early, late, outcome([], [])], Window(1.0, 5.0))
    # Reads at 1, 2 and 4 brought 1, 1 and 4 tokens; those at 1.5 and 2.5 one each, the first without a gap.
    assert delivery.tokens_per_s == 8 / 4
    assert delivery.tokens_per_read == 8 / 5
    assert (delivery.gap_ms.p50, delivery.gap_ms.p99) == (1000.0, 2000.0)
    assert (delivery.itl_ms.p50, delivery.itl_ms.p99) == (500.0, 1000.0)


def test_a_share_of_a_core_is_taken_between_samples() -> None:
    samples = [(0.0, 10.0), (2.0, 11.0), (4.0, 11.0)]
    assert core_frac(samples, 1.0, 3.0) == 0.25


@pytest.mark.parametrize("name", ["steady", "crowd"])
def test_a_full_batch_has_work_for_as_long_as_asked(name: str) -> None:
    scenario = make_scenario(name, num_streams=3000, tokens_per_s=16_000, seconds=20)
    num_steps = sum(row.output_len for row in scenario.lengths) / scenario.num_running
    assert num_steps * scenario.step_s >= 19


def test_streams_of_a_crowd_end_at_different_times() -> None:
    lengths = make_scenario("crowd", 300, 16_000, 20).lengths
    assert len({row.output_len for row in lengths}) > 200


def test_drawn_ids_never_end_a_sequence() -> None:
    ids = RandomIds(100, eos_token_ids=(30, 31)).choose(np.zeros(5000, np.int32), np.zeros(5000, np.int64))
    assert {*range(2, 98)} - {30, 31} == set(ids.tolist())


def test_a_small_run_tells_what_was_asked_for_and_what_was_delivered(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    flags = ["--num_streams", "8", "--tokens_per_s", "400", "--seconds", "0.5", "--model_dir", str(model_dir)]

    status = bench_front_end.main([*flags, "--scenarios", "steady", "--json", str(path), "--max_itl_ms", "50"])

    assert status == 0
    (result,) = json.loads(path.read_text())["results"]
    assert (result["asked_tokens_per_s"], result["num_running"], result["num_failed"]) == (400, 8, 0)
    assert result["delivered"]["tokens_per_s"] > 0
    assert result["core_fracs"].keys() == {"client-0", "detokenizer", "http_server-0", "model_worker-0", "router"}
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["steady", "8"]


def test_the_server_ends_with_the_script(model_dir: Path) -> None:
    flags = ["--num_streams", "8", "--tokens_per_s", "8", "--seconds", "100", "--model_dir", str(model_dir)]
    script = subprocess.Popen(
        [sys.executable, "-P", SCRIPT, *flags], env=os.environ | {"PYTHONPATH": str(Path(SCRIPT).parent)}
    )
    try:
        wait_until(lambda: len(descendants(script.pid)) >= 6, "the server's processes")
        pids = descendants(script.pid)
    finally:
        script.send_signal(signal.SIGKILL)
        script.wait()
    wait_until(lambda: not any(map(is_alive, pids)), f"end of {pids}", timeout_s=20)


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for child in children_of(pid):
        found += [child, *descendants(child)]
    return found
