"""commit_tokens against its reference."""

import pytest
import torch

from lightserve.kernels.commit_tokens import commit_tokens, commit_tokens_reference
from tests.kernels.kit import DEVICE, randn


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("n", [0, 1, 128, 131])
def test_commit_tokens_equals_its_reference(n: int, counts: bool) -> None:
    token_ids = torch.randint(-1, 50, (n,), device=DEVICE).int()
    logprobs, rows = randn(n), torch.randperm(n, device=DEVICE).int()
    states = []
    for commit in (commit_tokens, commit_tokens_reference):
        next_token = torch.full((n + 1,), 7, device=DEVICE).int()
        token_counts = torch.ones(n + 1, 50, device=DEVICE).int()
        out = torch.full((2, n), -9, device=DEVICE).int()
        commit(token_ids, logprobs, rows, next_token, out=out, token_counts=token_counts if counts else None)
        states.append((next_token, token_counts, out))
    for state, expected in zip(*states, strict=True):
        assert torch.equal(state, expected)
