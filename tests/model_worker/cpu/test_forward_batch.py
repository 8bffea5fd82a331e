"""Batches as tensors: the Token Table and the ids that decode rows go on with."""

import torch

from lightserve.model_worker.cpu.forward_batch import ForwardBatch
from lightserve.model_worker.host_batch import HostBatch
from tests.model_worker.tiny_plans import make_plan, make_rows


def test_a_mixed_plan_is_laid_out_with_decode_rows_first() -> None:
    rows = make_rows([4, 6, 9, 3], [5, 6, 2, 0])
    rows.next_token[:2] = torch.tensor([77, 78])
    batch = ForwardBatch.of(HostBatch.of(make_plan([1, 0], [(2, 2, 4), (3, 0, 3)]), rows), rows)
    assert batch.token_ids.tolist() == [78, 77, 202, 203, 204, 205, 300, 301, 302]
    assert batch.positions.tolist() == [6, 5, 2, 3, 4, 5, 0, 1, 2]
    assert batch.seq_lens.tolist() == [7, 6, 6, 3]
    assert batch.cu_seqlens.tolist() == [0, 1, 2, 6, 9]
    assert batch.sampled_tokens.tolist() == [0, 1, 8]  # row 2 has more to prefill: it gets no id (H11)
    assert batch.sampled_rows.tolist() == [1, 0, 3]
    assert batch.sampled_positions.tolist() == [7, 6, 3]
    assert rows.req_to_slots[2, 2:6].tolist() == [502, 503, 504, 505]
    assert rows.req_to_slots[1, 6] == 500


def test_a_failed_row_runs_on_some_valid_id() -> None:
    rows = make_rows([4], [4])
    rows.next_token[0] = -1
    batch = ForwardBatch.of(HostBatch.of(make_plan([0], []), rows), rows)
    assert batch.token_ids.tolist() == [0]
