"""Which part of a trace is drawn, and what counts as idle."""

import re

import pytest
from gpu_checks.kernel_tour import all_kernels
from plot_trace import decode_steps, kind_of

from lightserve.model_worker.profiling import GpuEvent

LAST, PROMPTS = re.compile("commit"), re.compile("prefill")
OTHERS = "norms, rotary embedding, others"
KIND_OF_MODULE = {
    "commit_tokens": "sampling",
    "copy_words": "copies",
    "decode_attention": "attention",
    "decode_plan": "attention",
    "embedding": OTHERS,
    "gated_gemm": "products",
    "gemv": "products",
    "greedy": "sampling",
    "penalties": "sampling",
    "place_tokens": OTHERS,
    "prefill_attention": "attention",
    "rms_norm": OTHERS,
    "rope_kv_write": OTHERS,
    "sampling": "sampling",
    "silu_mul": OTHERS,
    "skinny_gemm": "products",
}


def step(start: float, kernel: str = "_decode_attention_kernel", gap: float = 0.0) -> list[GpuEvent]:
    """100 µs, of which nothing runs in the first ``gap``."""
    return [(start + gap, start + 90, kernel), (start + 90, start + 100, "_commit_tokens_kernel")]


def trace(*steps: list[GpuEvent]) -> list[GpuEvent]:
    return sorted(event for events in steps for event in events)


def test_only_steps_behind_the_last_prompt_are_decode_steps() -> None:
    events = trace(step(0), step(100, "_prefill_attention_kernel"), step(200), step(300), step(400))
    steps = decode_steps(events, LAST, PROMPTS)
    assert steps.ends == [200, 300, 400, 500]
    assert min(start for start, _, _ in steps.events) == 200


def test_idle_time_is_what_no_kernel_covers() -> None:
    steps = decode_steps(trace(step(0), step(100, gap=5), step(200), step(300, gap=15)), LAST, PROMPTS)
    assert steps.gaps() == [(100, 105), (300, 315)]
    assert steps.idle_frac == pytest.approx(20 / 300)


def test_the_middle_keeps_whole_steps_and_cuts_what_reaches_in() -> None:
    events = trace(*(step(100.0 * i) for i in range(7)), [(150.0, 350.0, "Memcpy HtoD")])
    middle = decode_steps(events, LAST, PROMPTS).middle(2)
    assert middle.ends == [300, 400, 500]
    assert (300, 350, "Memcpy HtoD") in middle.events
    assert middle.idle_frac == 0


def test_a_trace_without_decode_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="no decode step"):
        decode_steps(trace(step(0, "_prefill_attention_kernel")), LAST, PROMPTS)


def test_every_kernel_of_ours_is_of_the_kind_of_its_module() -> None:
    kinds = {(module, name): kind_of(name) for module, name in all_kernels()}
    expected = {(module, name): KIND_OF_MODULE[module.rpartition(".")[2]] for module, name in kinds}
    assert kinds == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("nvjet_sm90_tst_128x64_64x8_4x1_v_bz_TNN", "products"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)", OTHERS),
    ],
)
def test_kernels_of_others_are_told_apart_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind
