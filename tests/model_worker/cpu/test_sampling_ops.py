"""The CPU's sampling against the kernels' reference, and by itself at the edges."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightserve.kernels.greedy import greedy_reference
from lightserve.kernels.penalties import penalties_reference
from lightserve.kernels.sampling import sample_reference
from lightserve.model_worker.cpu.sampling_ops import greedy, penalties, sample

VOCAB = 300
INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(logits: torch.Tensor, **overrides: Any) -> tuple[list[int], list[float]]:
    n = len(logits)
    values: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "vocab_size": VOCAB}
    values |= {"seeds": range(n), "positions": [7] * n} | overrides
    token_ids, logprobs = sample(logits, **_tensors(values, n))
    return token_ids.tolist(), logprobs.tolist()


def _tensors(values: dict[str, Any], n: int) -> dict[str, Any]:
    integers = {"top_k": torch.int32, "seeds": torch.int64, "positions": torch.int32}
    plain = {"vocab_size": values["vocab_size"], "scores": values.get("scores")}
    named = {name: value for name, value in values.items() if name not in plain}
    lists = {name: list(value) if hasattr(value, "__iter__") else [value] * n for name, value in named.items()}
    return plain | {name: torch.tensor(value, dtype=integers.get(name, torch.float32)) for name, value in lists.items()}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 5, 299, 300, 4000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.999]),
)
def test_draws_equal_the_references(
    seed: int, dtype: torch.dtype, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(4, VOCAB + 4) * 3).to(dtype)
    values = {"temperature": temperature, "top_k": [top_k, 0, top_k, 3], "top_p": [top_p, top_p, 1.0, 0.5]}
    values |= {"min_p": min_p, "seeds": [seed, 2**63 - 1, 5, 5], "positions": [0, 1, 2, 3], "vocab_size": VOCAB}
    tensors = _tensors(values, 4)
    token_ids, logprobs = sample(logits, **tensors)
    expected_ids, expected_logprobs = sample_reference(logits, **tensors)
    assert token_ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_equals_the_reference(dtype: torch.dtype) -> None:
    logits = torch.randn(5, VOCAB + 3).to(dtype)
    token_ids, logprobs = greedy(logits, vocab_size=VOCAB)
    expected_ids, expected_logprobs = greedy_reference(logits, vocab_size=VOCAB)
    assert token_ids.dtype == torch.int32
    assert token_ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4])
@pytest.mark.parametrize("top_p", [1e-6, 1.0])
def test_tiny_temperatures_and_huge_logits_give_the_greatest(temperature: float, top_p: float) -> None:
    logits = torch.randn(3, VOCAB).half()
    logits[0, 17] = 60000
    logits[1] = -60000
    logits[1, 4] = 60000
    logits[2, 5] = -INF
    expected = logits.argmax(-1).tolist()
    assert draw(logits, temperature=temperature, top_p=top_p)[0] == expected


def test_a_tiny_top_p_keeps_the_top_token() -> None:
    logits = torch.randn(8, VOCAB)
    assert draw(logits, temperature=5.0, top_p=1e-6)[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_that_is_not_finite_gives_minus_one_and_disturbs_no_other(bad: float, temperature: float) -> None:
    logits = torch.randn(3, VOCAB)
    expected = draw(logits, temperature=temperature)[0]
    logits[1, 40] = bad
    token_ids, logprobs = draw(logits, temperature=temperature)
    assert token_ids == [expected[0], -1, expected[2]]
    assert logprobs[1] == 0


def test_a_row_of_minus_infinities_gives_minus_one() -> None:
    logits = torch.full((1, VOCAB), -INF)
    assert draw(logits)[0] == [-1]
    assert greedy(logits, vocab_size=VOCAB)[0].tolist() == [-1]


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_ids_beyond_the_vocabulary_are_never_chosen(temperature: float) -> None:
    logits = torch.zeros(64, VOCAB)
    logits[:, 200:] = 100
    token_ids, logprobs = draw(logits, temperature=temperature, vocab_size=200)
    assert max(token_ids) < 200
    assert logprobs == pytest.approx([-5.298] * 64, abs=1e-3)  # log(1 / 200): the others are no part of it
    assert max(greedy(logits, vocab_size=200)[0].tolist()) < 200


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.randn(6, VOCAB)
    scores = logits.clone()
    scores[:, :50] -= 1000
    token_ids, logprobs = draw(logits, temperature=0.7, top_k=3, top_p=0.1, scores=scores)
    expected = logits.log_softmax(-1)[range(6), token_ids]
    assert min(token_ids) >= 50
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    row = torch.randn(1, VOCAB)
    alone = draw(row, seeds=[11], positions=[5])[0]
    crowd = torch.cat((torch.randn(3, VOCAB), row, torch.randn(2, VOCAB)))
    assert draw(crowd, seeds=[1, 2, 3, 11, 4, 5], positions=[9, 9, 9, 5, 9, 9])[0][3] == alone[0]


def test_seeds_and_positions_give_different_draws_and_the_same_again() -> None:
    logits = torch.zeros(64, VOCAB)
    by_seed = draw(logits, seeds=range(64), positions=[5] * 64)[0]
    by_position = draw(logits, seeds=[5] * 64, positions=range(64))[0]
    assert len(set(by_seed)) > 40
    assert len(set(by_position)) > 40
    assert draw(logits, seeds=range(64), positions=[5] * 64)[0] == by_seed


def test_frequencies_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    logits = probabilities.log().expand(20000, 4)
    token_ids = draw(logits, seeds=range(20000), positions=[3] * 20000, vocab_size=4)[0]
    found = torch.tensor(token_ids).bincount(minlength=4) / 20000
    torch.testing.assert_close(found, probabilities, rtol=0, atol=0.015)


def test_penalties_of_many_rows_equal_the_reference() -> None:
    torch.manual_seed(0)
    logits = torch.randn(19, VOCAB)
    counts = torch.randint(0, 3, (20, VOCAB), dtype=torch.int32)
    rows = torch.randperm(20)[:19].int()
    amounts = [torch.rand(19) + 0.5 for _ in range(3)]
    expected = penalties_reference(logits, counts, rows, *amounts)
    torch.testing.assert_close(penalties(logits, counts, rows, *amounts), expected, rtol=0, atol=0)


def test_many_rows_draw_what_each_draws_alone() -> None:
    logits = torch.randn(19, VOCAB)
    together = draw(logits, top_p=0.9)
    alone = [draw(logits[i : i + 1], top_p=0.9, seeds=[i]) for i in range(19)]
    assert together[0] == [ids[0] for ids, _ in alone]
    assert greedy(logits, vocab_size=VOCAB)[0].tolist() == logits.argmax(-1).tolist()
