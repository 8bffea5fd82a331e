"""Penalties and forbidden ids against their references, and against the rule itself."""

from collections.abc import Callable

import pytest
import torch

from lightserve.kernels.penalties import (
    IN_PROMPT,
    count_sampled,
    count_tokens,
    forbid,
    forbid_reference,
    penalties,
    penalties_reference,
)
from tests.kernels.kit import DEVICE, DTYPES, assert_close, int32, poisoned, randn, short, sparse


def counts_of(ids: list[int], prompt_len: int, vocab_size: int = 8) -> torch.Tensor:
    token_counts = torch.full((3, vocab_size), 99, dtype=torch.int32, device=DEVICE)
    count_tokens(token_counts, 1, int32(ids), prompt_len)
    return token_counts


def column(value: float) -> torch.Tensor:
    return torch.tensor([value], device=DEVICE)


@pytest.mark.parametrize(("logit", "penalised"), [(2.6, 2.0), (-1.0, -1.3)])
def test_repetition_divides_positive_and_multiplies_negative_logits_once_per_id(logit: float, penalised: float) -> None:
    scores = penalties(
        torch.full((1, 8), logit, device=DEVICE), counts_of([5, 5, 6], 2), int32([1]), column(1.3), column(0), column(0)
    )
    expected = [logit] * 5 + [penalised, penalised, logit]
    assert scores[0].tolist() == pytest.approx(expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits, counts = torch.zeros(1, 8, device=DEVICE), counts_of([5, 5, 6, 6, 7], 2)
    presence = penalties(logits, counts, int32([1]), column(1), column(0.5), column(0))
    frequency = penalties(logits, counts, int32([1]), column(1), column(0), column(0.5))
    assert presence[0].tolist() == [0, 0, 0, 0, 0, 0, -0.5, -0.5]
    assert frequency[0].tolist() == [0, 0, 0, 0, 0, 0, -1.0, -0.5]


def test_counting_starts_anew_and_goes_on_with_what_is_sampled() -> None:
    counts = counts_of([5, 5, 6], 2)
    count_sampled(counts, int32([1, 2, 2]), int32([6, 3, -1]))
    assert counts[1].tolist() == [0, 0, 0, 0, 0, IN_PROMPT, 2, 0]
    assert counts[2].tolist() == [99, 99, 99, 100, 99, 99, 99, 99]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 997), (4, 49152)])
def test_penalties_equal_their_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, vocab_size = shape
    logits = randn(n, vocab_size + 3, dtype=dtype)[:, :vocab_size]
    token_counts = torch.randint(0, 3, (n + 1, vocab_size + 5), dtype=torch.int32, device=DEVICE)
    token_counts += IN_PROMPT * torch.randint(0, 2, token_counts.shape, dtype=torch.int32, device=DEVICE)
    parameters = [randn(n).abs() + 0.5, randn(n), randn(n)]
    req_rows = torch.randperm(n + 1).int()[:n].to(DEVICE)
    out = penalties(logits, token_counts, req_rows, *parameters, out=poisoned(n, vocab_size, dtype=torch.float32))
    assert_close(out, penalties_reference(logits, token_counts, req_rows, *parameters))


def test_forbidden_ids_become_minus_infinity_and_no_others() -> None:
    scores, ids = randn(3, 50), torch.tensor([[-1, 4, 49], [-1, -1, -1], [0, 0, 7]], dtype=torch.int32, device=DEVICE)
    expected = scores.clone()
    forbid_reference(expected, ids)
    forbid(scores, ids)
    assert torch.equal(scores, expected)
    assert scores.isinf().sum() == 4


@pytest.mark.parametrize(
    ("name", "spoil", "text"),
    [
        ("logits", sparse, r"logits with strides \(16, 2\) must have contiguous rows"),
        ("token_counts", lambda x: x[:, :7], r"token_counts of shape \(3, 7\) must be 3 rows of at least 8"),
        ("token_counts", sparse, r"token_counts with strides \(16, 2\) must have contiguous rows"),
        ("req_rows", short, r"req_rows of shape \(1,\) must be of shape \(2,\)"),
        ("repetition", short, r"repetition of shape \(1,\) must be of shape \(2,\)"),
        ("presence", short, r"presence of shape \(1,\) must be of shape \(2,\)"),
        ("frequency", sparse, r"frequency with strides \(2,\) must be contiguous"),
        ("out", short, r"out of shape \(1, 8\) must be of shape \(2, 8\)"),
    ],
)
def test_what_does_not_fit_is_named(name: str, spoil: Callable[[torch.Tensor], torch.Tensor], text: str) -> None:
    tensors = {
        "logits": randn(2, 8),
        "token_counts": counts_of([1], 1),
        "req_rows": int32([1, 1]),
        "repetition": randn(2),
        "presence": randn(2),
        "frequency": randn(2),
        "out": randn(2, 8),
    }
    tensors[name] = spoil(tensors[name])
    with pytest.raises(ValueError, match=text):
        penalties(**tensors)


def test_forbidden_ids_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"forbidden_ids of shape \(1, 3\) must be of shape \(2, 3\)"):
        forbid(randn(2, 8), int32([0] * 3).view(1, 3))
    with pytest.raises(ValueError, match=r"forbidden_ids with strides \(6, 2\) must be contiguous"):
        forbid(randn(2, 8), sparse(int32([0] * 6).view(2, 3)))
    with pytest.raises(ValueError, match=r"scores with strides \(16, 2\) must have contiguous rows"):
        forbid(sparse(randn(2, 8)), int32([0] * 6).view(2, 3))
