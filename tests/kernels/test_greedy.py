"""greedy against its reference, and against what a client may expect."""

import pytest
import torch

from lightserve.kernels.greedy import greedy, greedy_reference
from tests.kernels.kit import DEVICE, DTYPES, assert_close, randn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 10), (1, 1), (5, 997), (2, 49152)])
def test_greedy_equals_its_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = randn(*shape, dtype=dtype)
    token_ids, logprobs = greedy(logits, vocab_size=shape[1])
    expected_ids, expected_logprobs = greedy_reference(logits, vocab_size=shape[1])
    assert torch.equal(token_ids, expected_ids)
    assert_close(logprobs, expected_logprobs)


def test_the_lowest_id_is_taken_among_equals() -> None:
    logits = torch.zeros(1, 10_000, device=DEVICE)
    logits[0, [77, 78, 9_000]] = 1
    for choose in (greedy, greedy_reference):
        assert choose(logits, vocab_size=10_000)[0].item() == 77


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_is_told_by_minus_one_and_harms_no_other(bad: float) -> None:
    logits = randn(3, 5_000)
    whole = greedy(logits, vocab_size=5_000)[0]
    logits[1, 4_500] = bad
    for choose in (greedy, greedy_reference):
        token_ids, logprobs = choose(logits, vocab_size=5_000)
        assert (token_ids[1].item(), logprobs[1].item()) == (-1, 0)
        assert torch.equal(token_ids[[0, 2]], whole[[0, 2]])


def test_a_row_of_nothing_but_minus_infinity_is_broken() -> None:
    logits = torch.full((1, 5), float("-inf"), device=DEVICE)
    assert greedy(logits, vocab_size=5)[0].item() == -1


def test_ids_beyond_the_tokenizer_are_never_chosen() -> None:
    logits = randn(16, 1024)
    logits[:, 1000:] = 50
    assert greedy(logits, vocab_size=1000)[0].max() < 1000


def test_the_logprob_of_a_certain_token_is_zero_without_a_sign() -> None:
    logits = torch.full((1, 300), -60000.0, device=DEVICE)
    logits[0, 17] = 60000
    assert str(greedy(logits, vocab_size=300)[1].item()) == "0.0"


def test_narrow_logits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits of shape \(2, 9\) must be 2 rows of at least 10"):
        greedy(randn(2, 9), vocab_size=10)
