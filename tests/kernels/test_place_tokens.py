"""place_tokens against its reference."""

import pytest
import torch

from lightserve.kernels.place_tokens import place_tokens, place_tokens_reference
from tests.kernels.kit import DEVICE, int32


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
