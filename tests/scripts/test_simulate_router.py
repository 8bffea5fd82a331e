import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulate_router
from router_simulation.modelled_worker import KnownLengths, ModelledWorker, StepModel, VirtualClock
from router_simulation.simulation import POLICIES

from lightserve.ipc.messages import StepPlan, pack_int32

KEYS = {
    *("req_per_s", "output_tok_per_s", "goodput_req_per_s", "peak_slots", "mean_slots", "max_total_token_num"),
    *("date", "command", "commit", "gpu", "versions", "pauses", "decision_us_p50", "decision_us_p99", "hit_rate"),
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Half of the requests have short prompts and long answers, half the reverse."""
    rng = np.random.default_rng(0)
    path = tmp_path / "trace.csv"
    lines = [
        f"{rng.integers(5, 20)},{rng.integers(100, 150)}"
        if number % 2
        else f"{rng.integers(200, 400)},{number % 9 + 5}"
        for number in range(120)
    ]
    path.write_text("\n".join(["prompt_len,output_len", *lines]) + "\n")
    return path


def simulate(tmp_path: Path, trace: Path, *flags: str) -> dict[str, Any]:
    result = tmp_path / "result.json"
    ours = ["--trace", str(trace), "--max_total_token_num", "3000", "--json", str(result)]
    assert simulate_router.main([*ours, *flags]) == 0
    report: dict[str, Any] = json.loads(result.read_text())
    return report


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everybody_within_the_pool(policy: str, trace: Path, tmp_path: Path) -> None:
    report = simulate(tmp_path, trace, "--router_policy", policy, "--max_new_tokens", "200")
    assert report.keys() >= KEYS
    assert report["failed"] == 0
    assert report["peak_slots"] <= 3000
    tokens = sum(int(line.split(",")[1]) for line in trace.read_text().splitlines()[1:])
    assert report["output_tok_per_s"] * report["duration_s"] == pytest.approx(tokens)
    if policy in ("conservative", "reserve_all", "static"):
        assert report["pauses"] == 0


def test_known_lengths_fill_the_pool_better_than_reserving(trace: Path, tmp_path: Path) -> None:
    ours, theirs, static = (
        simulate(tmp_path, trace, "--router_policy", policy) for policy in ("conservative", "reserve_all", "static")
    )
    assert ours["req_per_s"] > theirs["req_per_s"] > static["req_per_s"]
    assert ours["mean_use_while_waiting"] > theirs["mean_use_while_waiting"]


def test_two_runs_are_the_same_but_for_the_wall_clock(trace: Path, tmp_path: Path) -> None:
    first, second = (
        {
            name: value
            for name, value in simulate(tmp_path, trace, "--request_rate", "50").items()
            if not name.startswith(("decision_us", "wall_s", "date"))
        }
        for _ in range(2)
    )
    assert first == second


def test_blocks_that_the_trace_names_are_found_in_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * number, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2**63 - 1, 3 + number]}
        for number in range(10)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    report = simulate(tmp_path, path)
    assert report["hit_rate"] == pytest.approx(9 * 1024 / (10 * 1100))


def test_a_step_waits_for_the_weights_or_for_the_products() -> None:
    model = StepModel("", launch_s=1.0, weights_s=10.0, token_s=1.0, context_token_s=0.5, prompt_pair_s=0.0)
    assert model.duration_s(1, 4, 0) == 1 + 10 + 2
    assert model.duration_s(50, 0, 0) == 1 + 50


def test_a_modelled_worker_says_whether_it_waited_for_a_step() -> None:
    clock = VirtualClock()
    model = StepModel("two seconds", 2.0, weights_s=0, token_s=0, context_token_s=0, prompt_pair_s=0)
    worker = ModelledWorker(model, clock, KnownLengths(np.zeros(1, np.int64), num_rows=1), num_rows=1)
    one_row = StepPlan(0, b"", [], pack_int32([0]), b"", b"", b"", pack_int32([0]))
    waited = []
    for at_s in (0.0, 1.0, 5.0):  # the second step runs from 2 to 4
        clock.wait_until(at_s)
        waited.append(result.device_waited if (result := worker.step(one_row)) else None)
    assert waited == [None, False, True]
