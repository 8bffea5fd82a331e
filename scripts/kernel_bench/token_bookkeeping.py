"""Cases of what brings a step's words and keeps its ids and slots: a launch each, with little to move."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from kernel_bench.case import VOCAB_SIZE, Case, copies, num_different, worst
from lightserve.kernels.commit_tokens import commit_tokens, commit_tokens_reference
from lightserve.kernels.copy_words import copy_words, copy_words_reference
from lightserve.kernels.place_tokens import place_tokens, place_tokens_reference


def copy_words_cases(word_counts: Sequence[int] = (16, 4096, 40_000)) -> Iterator[Case]:
    """Words of a decode row, of some hundred, and of a large step; a copy from the host is no ceiling for these."""
    for n in word_counts:
        sets = [_on_host(torch.randint(0, 1 << 31, (n,)).int()) for _ in copies(8 * n)]
        out = torch.empty(n, dtype=torch.int32)
        runs = [partial(copy_words, words, out=out) for words in sets]
        yield Case(f"n = {n}", runs, partial(_copy_words_error, sets[0]), bytes=8 * n)


def _copy_words_error(words: torch.Tensor) -> float:
    outs = [torch.full((len(words),), -1, dtype=torch.int32) for _ in range(2)]
    copy_words(words, out=outs[0])
    copy_words_reference(words, out=outs[1])
    return num_different(*outs)


def _on_host(words: torch.Tensor) -> torch.Tensor:
    """Lay words where a step's lie: on the host, page-locked where there is a GPU."""
    return words.cpu().pin_memory() if torch.cuda.is_available() else words


def place_tokens_cases(
    token_counts: Sequence[int] = (1, 256, 8192), num_rows: int = 256, width: int = 8192
) -> Iterator[Case]:
    """Tokens of at most ``num_rows`` requests, half of whose ids were sampled in the step before."""
    table = torch.zeros(num_rows, width, dtype=torch.int32)
    next_token = torch.randint(0, VOCAB_SIZE, (num_rows,)).int()
    for n in token_counts:
        token = torch.arange(n).int()
        places = token % num_rows, token // num_rows
        size = n * 7 * 4
        sets = [
            (torch.randint(-VOCAB_SIZE, VOCAB_SIZE, (n,)).int(), next_token, *places, torch.randperm(n).int())
            for _ in copies(size)
        ]
        runs = [partial(place_tokens, *tokens, table) for tokens in sets]
        yield Case(f"n = {n}", runs, partial(_place_tokens_error, *sets[0], width), bytes=size)


def _place_tokens_error(
    given_ids: torch.Tensor,
    next_token: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> float:
    tokens = (given_ids, next_token, rows, positions, slots)
    table, expected_table = (torch.full((len(next_token), width), -1, dtype=torch.int32) for _ in range(2))
    ids = place_tokens(*tokens, table)
    expected_ids = place_tokens_reference(*tokens, expected_table)
    return worst(num_different(ids, expected_ids), num_different(table, expected_table))


def commit_tokens_cases(row_counts: Sequence[int] = (1, 256), vocab_size: int = VOCAB_SIZE) -> Iterator[Case]:
    num_rows = max(row_counts)
    next_token = torch.zeros(num_rows, dtype=torch.int32)
    counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32)
    for n in row_counts:
        rows, out_row = torch.randperm(num_rows)[:n].int(), torch.zeros(1).int()
        commit = partial(commit_tokens, out_row=out_row, out=_on_host(torch.zeros(1, 2 * n).int()))
        for token_counts, name, size in ((None, f"n = {n}", n * 6 * 4), (counts, f"n = {n}, counted", n * 8 * 4)):
            sets = [(torch.randint(0, vocab_size, (n,)).int(), torch.randn(n)) for _ in copies(size)]
            runs = [partial(commit, *sampled, rows, next_token, token_counts=token_counts) for sampled in sets]
            yield Case(name, runs, partial(_commit_tokens_error, *sets[0], rows, token_counts), bytes=size)


def _commit_tokens_error(
    token_ids: torch.Tensor, logprobs: torch.Tensor, rows: torch.Tensor, token_counts: torch.Tensor | None
) -> float:
    states = []
    for commit in (commit_tokens, commit_tokens_reference):
        next_token = torch.full((int(rows.max()) + 1,), -1).int()
        out = _on_host(torch.full((2, 2 * len(rows)), -1).int())
        counts = None if token_counts is None else token_counts.clone()
        commit(token_ids, logprobs, rows, next_token, out_row=torch.ones(1).int(), out=out, token_counts=counts)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        states.append([next_token, out] if counts is None else [next_token, out, counts])
    return worst(*(num_different(state, expected) for state, expected in zip(*states, strict=True)))
