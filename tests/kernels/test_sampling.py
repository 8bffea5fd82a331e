"""sample against its reference, and against what a client may expect."""

import pytest
import torch

from lightserve.kernels.draw import kept_mass_reference
from lightserve.kernels.sampling import sample, sample_reference
from lightserve.kernels.uniform import uniform_reference
from tests.kernels.kit import DEVICE, assert_close, int32, randn, short, sparse


def batch(
    n: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 7
) -> tuple[torch.Tensor, ...]:
    """Parameters of n equal rows, at the positions 0 … n - 1."""
    return (
        torch.full((n,), temperature, device=DEVICE),
        int32([top_k] * n),
        torch.full((n,), top_p, device=DEVICE),
        torch.full((n,), min_p, device=DEVICE),
        torch.full((n,), seed, dtype=torch.int64, device=DEVICE),
        torch.arange(n, dtype=torch.int32, device=DEVICE),
    )


FILTERS = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 3000},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"temperature": 3.0, "top_k": 200, "top_p": 0.5, "min_p": 0.001},
]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, torch.float32), (997, torch.float16), (6_000, torch.bfloat16), (6_000, torch.float32)]
)
@pytest.mark.parametrize("filters", FILTERS)
def test_the_draw_is_where_the_uniform_number_falls_in_the_filtered_distribution(
    filters: dict[str, float], vocab_size: int, dtype: torch.dtype
) -> None:
    logits = randn(2, vocab_size + 3, dtype=dtype) * 3
    parameters = batch(2, **filters)  # type: ignore[arg-type]
    raw = logits[:, :vocab_size].double()
    scaled = (raw - raw.amax(1, keepdim=True)) / parameters[0].unsqueeze(1)
    mass = kept_mass_reference(scaled, *parameters[1:4])
    cumulative = (mass / mass.sum(1, keepdim=True)).cumsum(1)
    numbers = uniform_reference(*parameters[4:]).double()
    for draw in (sample, sample_reference):
        token_ids, logprobs = draw(logits, *parameters, vocab_size=vocab_size)
        ids = token_ids.long().unsqueeze(1)
        assert_close(logprobs, raw.log_softmax(-1).gather(1, ids).squeeze(1).float())
        assert (mass.gather(1, ids) > 0).all()
        upper = cumulative.gather(1, ids).squeeze(1)
        lower = upper - (mass / mass.sum(1, keepdim=True)).gather(1, ids).squeeze(1)
        assert ((lower - 1e-6 <= numbers) & (numbers <= upper + 1e-6)).all()


def test_frequencies_follow_the_filtered_distribution() -> None:
    n = 4000
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0], device=DEVICE).expand(n, 5).contiguous()
    parameters = batch(n, temperature=2.0, top_k=4, top_p=0.95)
    token_ids, _ = sample_reference(logits, *parameters, vocab_size=5)
    kept = kept_mass_reference((logits[:1] - 3) / 2, *(values[:1] for values in parameters[1:4]))
    expected = (kept / kept.sum()).squeeze(0).cpu()
    observed = token_ids.cpu().long().bincount(minlength=5) / n
    assert (observed - expected).abs().max() < 0.03
    assert observed[4] == 0


def test_a_draw_depends_on_neither_neighbours_nor_place() -> None:
    logits, parameters = randn(6, 1000), batch(6, seed=123)
    together, _ = sample(logits, *parameters, vocab_size=1000)
    order = torch.tensor([4, 2, 5, 0, 1, 3], device=DEVICE)
    shuffled, _ = sample(logits[order], *(values[order] for values in parameters), vocab_size=1000)
    assert torch.equal(shuffled, together[order])
    for i in range(6):
        alone, _ = sample(logits[i : i + 1], *(values[i : i + 1] for values in parameters), vocab_size=1000)
        assert alone.item() == together[i].item()


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4])
@pytest.mark.parametrize("top_p", [1e-6, 1.0])
def test_tiny_temperatures_and_extreme_logits_give_the_largest(temperature: float, top_p: float) -> None:
    logits = torch.full((1, 300), -60000.0, dtype=torch.float16, device=DEVICE)
    logits[0, 17], logits[0, 40] = 60000, float("-inf")
    for draw in (sample, sample_reference):
        token_ids, logprobs = draw(logits, *batch(1, temperature=temperature, top_p=top_p), vocab_size=300)
        assert (token_ids.item(), logprobs.item()) == (17, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_is_told_by_minus_one_and_harms_no_other(bad: float) -> None:
    logits, parameters = randn(3, 500), batch(3)
    whole, _ = sample(logits, *parameters, vocab_size=500)
    logits[1, 77] = bad
    for draw in (sample, sample_reference):
        token_ids, logprobs = draw(logits, *parameters, vocab_size=500)
        assert (token_ids[1].item(), logprobs[1].item()) == (-1, 0)
        assert (token_ids[[0, 2]] >= 0).all()
    assert torch.equal(sample(logits, *parameters, vocab_size=500)[0][[0, 2]], whole[[0, 2]])


def test_a_row_of_nothing_but_minus_infinity_is_broken() -> None:
    logits = torch.full((1, 5), float("-inf"), device=DEVICE)
    assert sample(logits, *batch(1), vocab_size=5)[0].item() == -1


def test_ids_beyond_the_tokenizer_are_never_chosen() -> None:
    logits = randn(16, 1024)
    logits[:, 1000:] = 50
    assert sample(logits, *batch(16, temperature=5), vocab_size=1000)[0].max() < 1000


def test_the_logprob_is_of_the_raw_distribution() -> None:
    logits, scores = randn(2, 50), randn(2, 50)
    token_ids, logprobs = sample(logits, *batch(2, temperature=0.5, top_k=1), vocab_size=50, scores=scores)
    assert torch.equal(token_ids, scores.argmax(-1).int())
    assert_close(logprobs, logits.log_softmax(-1).gather(1, token_ids.long().unsqueeze(1)).squeeze(1))


def test_equals_at_the_threshold_are_all_kept() -> None:
    logits = torch.zeros(2, 6000, device=DEVICE)  # more equals than candidates fit
    for draw in (sample, sample_reference):
        token_ids, _ = draw(logits, *batch(2, top_k=5), vocab_size=6000)
        assert token_ids.max() >= 5


@pytest.mark.parametrize("name", ["logits", "scores"])
def test_narrow_and_strewn_rows_are_named(name: str) -> None:
    tensors = {"logits": randn(2, 10), "scores": randn(2, 10)}
    for spoiled, text in (
        (randn(2, 9), rf"{name} of shape \(2, 9\) must be 2 rows of at least 10"),
        (sparse(randn(2, 10)), rf"{name} with strides \(20, 2\) must have contiguous rows"),
    ):
        given = {**tensors, name: spoiled}
        with pytest.raises(ValueError, match=text):
            sample(given["logits"], *batch(2), vocab_size=10, scores=given["scores"])


def test_scores_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scores of shape \(1, 10\) must be 2 rows of at least 10"):
        sample(randn(2, 10), *batch(2), vocab_size=10, scores=randn(1, 10))


@pytest.mark.parametrize("index", range(6))
def test_a_parameter_without_an_entry_for_each_row_is_named(index: int) -> None:
    name = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")[index]
    parameters = list(batch(2))
    for spoil, text in ((short, r"of shape \(1,\) must be of shape \(2,\)"), (sparse, r"with strides \(2,\) must be")):
        spoiled = [*parameters[:index], spoil(parameters[index]), *parameters[index + 1 :]]
        with pytest.raises(ValueError, match=f"{name} {text}"):
            sample(randn(2, 10), *spoiled, vocab_size=10)
