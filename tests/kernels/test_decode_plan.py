"""plan_decode against its reference, and what every plan must hold."""

import pytest
import torch

from lightserve.kernels.decode_plan import DecodePlan, plan_decode, plan_decode_reference
from tests.kernels.kit import int32

BATCHES = [[1], [0, 0], [100_000], [5, 100_000, 0, 700], [640] * 300, list(range(1, 1025))]


@pytest.mark.parametrize("multiprocessors", [1, 16, 132])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(8, 64), (8, 128), (1, 80)])
@pytest.mark.parametrize("seq_lens", [[], *BATCHES])
def test_a_plan_equals_its_reference(
    seq_lens: list[int], num_kv_heads: int, head_dim: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.kernels.decode_plan.num_multiprocessors", lambda device: multiprocessors)
    batch = (int32(torch.randperm(len(seq_lens)).tolist()), int32(seq_lens))
    plan, expected = (
        make_plan(*batch, num_heads=8, num_kv_heads=num_kv_heads, head_dim=head_dim)
        for make_plan in (plan_decode, plan_decode_reference)
    )
    assert torch.equal(plan.requests, expected.requests)
    assert not plan.arrivals.any()
    assert plan.items.shape == expected.items.shape
    if seq_lens:  # else nobody reads the items
        assert torch.equal(plan.items[:, 0], expected.items[:, 0])
        assert torch.equal(used_items(plan), used_items(expected))


def used_items(plan: DecodePlan) -> torch.Tensor:
    return plan.items[plan.items[:, 0] >= 0, :7]


@pytest.mark.parametrize("seq_lens", BATCHES)
def test_a_plan_covers_every_position_once_with_room_for_all_items(seq_lens: list[int]) -> None:
    req_rows = int32([i + 7 for i in range(len(seq_lens))])
    items = plan_decode(req_rows, int32(seq_lens), num_heads=8, num_kv_heads=8, head_dim=64).items.tolist()
    used = [item[:6] for item in items if item[0] >= 0]
    assert all(item[0] == -1 for item in items[len(used) :])
    for req, seq_len in enumerate(seq_lens):
        mine = [item for item in used if item[0] == req]
        assert [item[2] for item in mine] == [0] + [item[3] for item in mine[:-1]]
        assert mine[-1][3] == seq_len
        assert all(item[1] == req + 7 and used[item[4]] == mine[0] and item[5] == len(mine) for item in mine)
        assert all((item[3] - item[2]) % 32 == 0 for item in mine[:-1])


def test_a_plan_fills_the_device_with_one_request_and_never_more_than_its_room() -> None:
    items = plan_decode(int32([0]), int32([100_000]), num_heads=2, num_kv_heads=1, head_dim=128).items
    assert (items[:, 0] == 0).sum() > 0.9 * len(items)


@pytest.mark.parametrize(
    ("num_reqs", "room", "seq_len", "num_items"),
    [
        (1, 1, 8192, 32),  # as many programs as there is room for
        (4, 8, 584, 5),
        (16, 16, 584, 2),
        (16, 16, 64, 1),
        (16, 16, 65, 2),
        (24, 64, 584, 2),
        (64, 64, 584, 1),  # whole requests fill the device
        (256, 256, 584, 1),
        (256, 256, 100_000, 1),
    ],
)
def test_equal_requests_of_an_8b_are_cut_while_that_fills_an_h200(
    num_reqs: int, room: int, seq_len: int, num_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.kernels.decode_plan.num_multiprocessors", lambda device: 132)
    seq_lens = int32([seq_len] * num_reqs + [0] * (room - num_reqs))
    plan = plan_decode(int32([*range(room)]), seq_lens, num_heads=32, num_kv_heads=8, head_dim=128)
    assert plan.requests[:num_reqs, 1].tolist() == [num_items] * num_reqs
