"""place_tokens against its reference."""

from collections.abc import Callable

import pytest
import torch

from lightserve.kernels.place_tokens import place_tokens, place_tokens_reference
from tests.kernels.kit import DEVICE, int32, short, sparse


@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 300])
def test_place_tokens_equals_its_reference(num_tokens: int) -> None:
    rows = torch.arange(num_tokens, device=DEVICE).int() % 7
    positions = torch.arange(num_tokens, device=DEVICE).int() // 7
    given_ids = torch.randint(-1, 3, (num_tokens,), device=DEVICE).int()
    next_token = torch.randint(-1, 1000, (8,), device=DEVICE).int()
    slots = torch.randperm(num_tokens, device=DEVICE).int()
    table, expected_table = (torch.full((8, 64), -5, device=DEVICE).int() for _ in range(2))
    ids = place_tokens(given_ids, next_token, rows, positions, slots, table)
    expected = place_tokens_reference(given_ids, next_token, rows, positions, slots, expected_table)
    assert torch.equal(ids, expected)
    assert torch.equal(table, expected_table)


def test_a_row_that_failed_goes_on_with_a_valid_id() -> None:
    ids = place_tokens(int32([-1]), int32([-1]), int32([0]), int32([0]), int32([3]), int32([9]).view(1, 1))
    assert ids.tolist() == [0]


@pytest.mark.parametrize(
    ("name", "spoil", "text"),
    [
        ("given_ids", sparse, r"given_ids with strides \(2,\) must be contiguous"),
        ("token_rows", short, r"token_rows of shape \(1,\) must be of shape \(2,\)"),
        ("positions", short, r"positions of shape \(1,\) must be of shape \(2,\)"),
        ("out_slots", short, r"out_slots of shape \(1,\) must be of shape \(2,\)"),
        ("out", short, r"out of shape \(1,\) must be of shape \(2,\)"),
        ("next_token", sparse, r"next_token with strides \(2,\) must be contiguous"),
        ("req_to_slots", short, r"req_to_slots of shape \(3, 5\) must be 4 rows"),
        ("req_to_slots", sparse, r"req_to_slots with strides \(10, 2\) must have contiguous rows"),
    ],
)
def test_what_does_not_fit_is_named(name: str, spoil: Callable[[torch.Tensor], torch.Tensor], text: str) -> None:
    tensors = {
        "given_ids": int32([-1, 7]),
        "next_token": int32([0] * 4),
        "token_rows": int32([0, 3]),
        "positions": int32([0, 4]),
        "out_slots": int32([8, 9]),
        "req_to_slots": int32([0] * 20).view(4, 5),
        "out": int32([0, 0]),
    }
    tensors[name] = spoil(tensors[name])
    with pytest.raises(ValueError, match=text):
        place_tokens(**tensors)
