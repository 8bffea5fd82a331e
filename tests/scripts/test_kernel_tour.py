"""The tour that the sanitizer follows, here through the interpreter."""

from collections import Counter

import pytest
import torch
from gpu_checks.kernel_tour import Group, Kernel, Model, Tour, all_kernels, run_tour

from lightserve.kernels import prefill_attention
from lightserve.sampling_params import SamplingParams

WAYS = [
    SamplingParams(2, temperature=0.0),
    SamplingParams(2, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01),
    SamplingParams(2, temperature=0.7, repetition_penalty=1.3, min_new_tokens=2),
]
MODEL = Model("qwen2", 2, 1, 16, 32, 259)
TOURS = [
    Tour([MODEL], [torch.bfloat16], [Group([6], 8, WAYS[:1]), Group([1, 2], 8, WAYS)]),
    Tour([MODEL], [torch.float32], [Group([2], 8, WAYS[:1])]),
]


def test_our_own_products_take_every_step_in_bfloat16_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(x: torch.Tensor, *_: object) -> torch.Tensor:
        raise AssertionError(f"the library is asked for a product of {len(x)} rows")

    tour = Tour([MODEL], [torch.bfloat16], [Group([1, 2, 140], 200, WAYS[:1])], own_products=True)
    monkeypatch.setattr("torch.nn.functional.linear", refuse)
    run_tour(tour, torch.device("cpu"))


def test_no_two_kernels_have_one_name() -> None:
    names = Counter(name for _, name in all_kernels())
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.timeout(400)  # interpreting is slow
def test_the_tour_launches_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else only prompts of hundreds of tokens have their keys copied side by side.
    monkeypatch.setattr(prefill_attention, "MIN_QUERIES_PER_KEY", 0)
    launched = set[Kernel]().union(*(run_tour(tour, torch.device("cpu")) for tour in TOURS))
    assert all_kernels() - launched == set()
