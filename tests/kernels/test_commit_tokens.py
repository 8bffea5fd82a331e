"""commit_tokens against its reference."""

from collections.abc import Callable

import pytest
import torch

from lightserve.kernels.commit_tokens import commit_tokens, commit_tokens_reference
from tests.kernels.kit import DEVICE, int32, randn, short, sparse


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize(("n", "row"), [(0, 0), (1, 2), (128, 1), (131, 0)])
def test_commit_tokens_equals_its_reference(n: int, row: int, counts: bool) -> None:
    token_ids = torch.randint(-1, 50, (n,), device=DEVICE).int()
    logprobs, rows = randn(n), torch.randperm(n, device=DEVICE).int()
    states = []
    for commit in (commit_tokens, commit_tokens_reference):
        next_token = torch.full((n + 1,), 7, device=DEVICE).int()
        token_counts = torch.ones(n + 1, 50, device=DEVICE).int()
        out = torch.full((3, 2 * n + 5), -9).int()  # on the host, where there is a GPU
        out = out.pin_memory() if DEVICE.type == "cuda" else out
        commit(
            token_ids,
            logprobs,
            rows,
            next_token,
            out_row=int32([row]),
            out=out,
            token_counts=token_counts if counts else None,
        )
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        states.append((next_token, token_counts, out))
    for state, expected in zip(*states, strict=True):
        assert torch.equal(state, expected)


@pytest.mark.parametrize(
    ("name", "spoil", "text"),
    [
        ("token_ids", sparse, r"token_ids with strides \(2,\) must be contiguous"),
        ("logprobs", short, r"logprobs of shape \(3,\) must be of shape \(4,\)"),
        ("req_rows", short, r"req_rows of shape \(3,\) must be of shape \(4,\)"),
        ("next_token", sparse, r"next_token with strides \(2,\) must be contiguous"),
        ("out_row", lambda out_row: out_row.repeat(2), r"out_row of shape \(2,\) must be of shape \(1,\)"),
        ("out", lambda out: out[:, 1:], r"out of shape \(2, 7\) must be 2 rows of at least 8"),
        ("out", sparse, r"out with strides \(16, 2\) must have contiguous rows"),
        ("token_counts", sparse, r"token_counts with strides \(100, 2\) must have contiguous rows"),
    ],
)
def test_what_does_not_fit_is_named(name: str, spoil: Callable[[torch.Tensor], torch.Tensor], text: str) -> None:
    tensors = {
        "token_ids": int32([3] * 4),
        "logprobs": randn(4),
        "req_rows": int32([0, 1, 2, 3]),
        "next_token": int32([0] * 5),
        "out_row": int32([0]),
        "out": int32([0] * 16).view(2, 8),
        "token_counts": torch.zeros(5, 50, device=DEVICE).int(),
    }
    tensors[name] = spoil(tensors[name])
    with pytest.raises(ValueError, match=text):
        commit_tokens(**tensors)
