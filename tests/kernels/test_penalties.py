"""Penalties and forbidden ids against their references, and against the rule itself."""

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
from tests.kernels.kit import DEVICE, DTYPES, assert_close, int32, poisoned, randn


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
