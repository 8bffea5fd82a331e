"""Engines compared by their greedy ids."""

from pathlib import Path

import check_against_transformers
import numpy as np
import pytest
from gpu_checks.ranks_check import write_tiny
from script_tools.greedy_ids import all_equal, greedy_ids, open_cpu_engine, scattered_slots
from script_tools.plain_ids import draw_ids, plain_ids

from lightserve.model_config import load_model_config


def test_prompts_get_the_same_ids_alone_and_in_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = open_cpu_engine(load_model_config(write_tiny(tmp_path, (4, 2))))
    prompts = [draw_ids(np.random.default_rng(0), 1003, length).tolist() for length in (1, 7, 60)]
    alone, logits = check_against_transformers.run_one_by_one(engine, prompts)
    assert [len(ids) for ids in alone] == [64] * 3
    assert [int(row.argmax()) for row in logits] == [ids[0] for ids in alone]
    together = greedy_ids(engine, prompts, scattered_slots(), 16)
    assert all_equal("in one batch", together, alone)
    assert not all_equal("another", [*together[:2], []], alone)
    assert capsys.readouterr().out == (
        "in one batch: 3 of 3 prompts get the 64 ids expected\nanother: 2 of 3 prompts get the 64 ids expected\n"
    )


def test_a_fiftieth_of_the_ids_at_either_end_is_not_plain() -> None:
    assert plain_ids(1000) == range(20, 980)
    assert set(draw_ids(np.random.default_rng(0), 100, 5000).tolist()) == {*range(2, 98)}
