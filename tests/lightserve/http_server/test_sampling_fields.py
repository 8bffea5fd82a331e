"""From what clients write to what the engine gets."""

from typing import Any

import pytest

from lightserve.http_server.sampling_fields import SamplingFields, for_choice
from lightserve.sampling_params import SamplingParams
from tests.lightserve.http_server.fake_engine import Script
from tests.lightserve.http_server.live_server import LiveServer


def resolve(
    room: int = 100, max_new_tokens: int | None = None, min_new_tokens: int | None = None, **fields: Any
) -> Any:
    parameters = SamplingFields(**fields)
    return parameters.sampling_params(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        greedy=parameters.greedy,
        room=room,
        vocab_size=50,
    )


def test_absent_fields_become_the_defaults() -> None:
    assert resolve(seed=7) == SamplingParams(max_new_tokens=100, seed=7)


@pytest.mark.parametrize("field", [{"temperature": 0}, {"temperature": 0.0}, {"top_p": 0}, {"min_p": 1}])
def test_greedy_in_all_its_forms(field: dict[str, Any]) -> None:
    params = resolve(**{"temperature": 0.7, **field})
    assert (params.temperature, params.top_p, params.min_p) == (0, 1, 0)


@pytest.mark.parametrize(("written", "meant"), [(None, 0), (-1, 0), (0, 0), (1, 1), (50, 50), (51, 50), (10**18, 50)])
def test_top_k_is_off_or_within_the_vocabulary(written: int | None, meant: int) -> None:
    assert resolve(top_k=written).top_k == meant


@pytest.mark.parametrize(("wanted", "got"), [(None, 100), (1, 1), (100, 100), (101, 100), (10**18, 100)])
def test_the_token_limit_is_clamped_to_the_room(wanted: int | None, got: int) -> None:
    assert resolve(max_new_tokens=wanted).max_new_tokens == got


def test_a_minimum_above_the_limit_means_the_limit() -> None:
    assert resolve(max_new_tokens=5, min_new_tokens=9).min_new_tokens == 5


def test_drawn_seeds_differ() -> None:
    assert len({resolve(seed=seed).seed for seed in (None, None, -1, -1)}) == 4


def test_choices_differ_in_the_seed_alone() -> None:
    params = resolve(seed=5, temperature=0.5)
    assert [for_choice(params, i).seed for i in range(3)] == [5, 6, 7]
    assert for_choice(params, 2).temperature == 0.5


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({}, 0),
        ({"temperature": 0.5}, 0),
        ({"do_sample": False, "temperature": 0.5}, 0),
        ({"do_sample": True}, 1),
        ({"do_sample": True, "temperature": 0.5}, 0.5),
    ],
)
def test_lightllm_samples_only_when_told_to(server: LiveServer, fields: dict[str, Any], temperature: float) -> None:
    server.client.post("/generate", json={"inputs": "hi", "parameters": fields})
    assert server.engine.requests[0].sampling.temperature == temperature


def test_every_parameter_reaches_the_engine(server: LiveServer) -> None:
    server.engine.script_for = lambda message: Script("a")
    common = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 11,
        "stop_token_ids": [3],
        "ignore_eos": False,
        "skip_special_tokens": False,
        "priority": 2,
        "timeout": 60,
        "cache_salt": "tenant",
    }
    lightllm = {**common, "max_new_tokens": 9, "min_new_tokens": 2, "stop_sequences": ["end"], "do_sample": True}
    server.client.post("/generate", json={"inputs": "hi", "parameters": lightllm})
    server.client.post(
        "/v1/completions", json={**common, "prompt": "hi", "max_tokens": 9, "min_tokens": 2, "stop": "end"}
    )
    expected = SamplingParams(9, 0.5, 0.9, 5, 0.1, 1.1, 0.2, 0.3, 11, 2, (3,), ignore_eos=False)
    first, second = server.engine.requests
    assert first.sampling == second.sampling == expected
    assert first.text == second.text
    for message in (first, second):
        assert (message.priority, message.timeout_s, message.cache_salt) == (2, 60.0, "tenant")
    assert (first.text.stop, first.text.skip_special_tokens, first.text.min_new_tokens) == (("end",), False, 2)
