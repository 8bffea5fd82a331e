"""Cases of what chooses a step's tokens: the draws, and what changes the scores before them."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from kernel_bench.case import BF16, VOCAB_SIZE, Case, copies, error_against, num_different, relative_error, worst
from lightserve.kernels.draw import kept_mass_reference
from lightserve.kernels.greedy import greedy, greedy_reference
from lightserve.kernels.penalties import forbid, forbid_reference, penalties, penalties_reference
from lightserve.kernels.sampling import sample
from lightserve.kernels.uniform import uniform_reference

ROW_COUNTS = (1, 64, 256)
FILTERS = ((0, 1.0), (50, 0.9), (0, 0.9))  # top-k, top-p


def greedy_cases(row_counts: Sequence[int] = ROW_COUNTS, vocab_size: int = VOCAB_SIZE) -> Iterator[Case]:
    for n in row_counts:
        sets = _logits(n, vocab_size)
        runs = [partial(greedy, logits, vocab_size=vocab_size) for logits in sets]
        yield Case(f"{n} x {vocab_size}", runs, partial(_greedy_error, sets[0]), bytes=sets[0].nbytes)


def _logits(n: int, vocab_size: int) -> list[torch.Tensor]:
    return [torch.randn(n, vocab_size) * 2 for _ in copies(n * vocab_size * 4)]  # float32, as the head gives them


def _greedy_error(logits: torch.Tensor) -> float:
    token_ids, logprobs = greedy(logits, vocab_size=logits.shape[1])
    expected_ids, expected_logprobs = greedy_reference(logits, vocab_size=logits.shape[1])
    return worst(num_different(token_ids, expected_ids), relative_error(logprobs, expected_logprobs))


def sampling_cases(row_counts: Sequence[int] = ROW_COUNTS, vocab_size: int = VOCAB_SIZE) -> Iterator[Case]:
    for n in row_counts:
        sets = _logits(n, vocab_size)
        for top_k, top_p in FILTERS:
            parameters = (
                torch.full((n,), 0.8),
                torch.full((n,), top_k, dtype=torch.int32),
                torch.full((n,), top_p),
                torch.zeros(n),
                torch.randint(0, 1 << 60, (n,)),
                torch.arange(n).int(),
            )
            runs = [partial(sample, logits, *parameters, vocab_size=vocab_size) for logits in sets]
            name = f"top-k {top_k}, top-p {top_p}, {n} x {vocab_size}"
            yield Case(name, runs, partial(_drawn_elsewhere, sets[0], parameters), bytes=sets[0].nbytes)


def _drawn_elsewhere(logits: torch.Tensor, parameters: tuple[torch.Tensor, ...]) -> float:
    """Measure the share of rows whose token is not where the uniform number falls, within float32's error."""
    vocab_size = logits.shape[1]
    token_ids = sample(logits, *parameters, vocab_size=vocab_size)[0].long().unsqueeze(1)
    exists = (token_ids >= 0) & (token_ids < vocab_size)
    token_ids = torch.where(exists, token_ids, 0)
    raw = logits.double()
    scaled = (raw - raw.amax(1, keepdim=True)) / parameters[0].unsqueeze(1)
    mass = kept_mass_reference(scaled, *parameters[1:4])
    share = mass / mass.sum(1, keepdim=True)
    upper = share.cumsum(1).gather(1, token_ids)
    lower = upper - share.gather(1, token_ids)
    number = uniform_reference(*parameters[4:]).double().unsqueeze(1)
    inside = (lower - 1e-5 <= number) & (number <= upper + 1e-5) & (share.gather(1, token_ids) > 0)
    return float((~(inside & exists)).double().mean())


def penalties_cases(row_counts: Sequence[int] = (256,), vocab_size: int = VOCAB_SIZE) -> Iterator[Case]:
    for n in row_counts:
        arguments = (
            torch.randn(n, vocab_size, dtype=BF16),
            torch.randint(0, 2, (n, vocab_size), dtype=torch.int32),
            torch.arange(n).int(),
            *(torch.full((n,), value) for value in (1.1, 0.5, 0.5)),
        )
        error = partial(error_against, penalties, penalties_reference, *arguments)
        runs = [partial(penalties, *arguments)] * 2
        yield Case(f"{n} x {vocab_size}", runs, error, bytes=n * vocab_size * (2 + 4 + 4))


def forbid_cases(row_counts: Sequence[int] = (1, 256), vocab_size: int = VOCAB_SIZE, width: int = 68) -> Iterator[Case]:
    """Rows that may forbid 64 stop ids beside the model's own, half of which they do."""
    for n in row_counts:
        scores, size = torch.randn(n, vocab_size), n * width * (4 + 2)
        sets = [torch.randint(-vocab_size, vocab_size, (n, width)).int().clamp_min(-1) for _ in copies(size)]
        runs = [partial(forbid, scores, ids) for ids in sets]
        yield Case(f"{n} x {width} of {vocab_size}", runs, partial(_forbid_error, scores, sets[0]), bytes=size)


def _forbid_error(scores: torch.Tensor, forbidden_ids: torch.Tensor) -> float:
    out, expected = scores.clone(), scores.clone()
    forbid(out, forbidden_ids)
    forbid_reference(expected, forbidden_ids)
    return num_different(out, expected)
