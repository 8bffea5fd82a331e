"""copy_words against its reference."""

from collections.abc import Callable

import pytest
import torch

from lightserve.kernels.copy_words import copy_words, copy_words_reference
from tests.kernels.kit import DEVICE, int32, short, sparse


def host_words(n: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (n,)).int().pin_memory() if DEVICE.type == "cuda" else int32([*range(n)])


@pytest.mark.parametrize("n", [0, 1, 3, 1024, 1025, 40_000])
def test_copy_words_equals_its_reference_and_writes_nothing_else(n: int) -> None:
    words = host_words(n)
    out, expected = (torch.full((n + 5,), -9, device=DEVICE).int() for _ in range(2))
    copy_words(words, out=out[4 : n + 4])
    copy_words_reference(words, out=expected[4 : n + 4])
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("name", "spoil", "text"),
    [
        ("words", sparse, r"words with strides \(2,\) must be contiguous"),
        ("out", sparse, r"out with strides \(2,\) must be contiguous"),
        ("out", short, r"out of shape \(7,\) must be of shape \(8,\)"),
    ],
)
def test_what_does_not_fit_is_named(name: str, spoil: Callable[[torch.Tensor], torch.Tensor], text: str) -> None:
    tensors = {"words": host_words(8), "out": int32([0] * 8)}
    tensors[name] = spoil(tensors[name])
    with pytest.raises(ValueError, match=text):
        copy_words(**tensors)
