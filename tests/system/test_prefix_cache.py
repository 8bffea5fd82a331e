"""The prefix cache under a real model worker: it changes what is computed, never what is said."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.client import Outcome, generation, stream_all
from tests.server import Server, wait_until
from tests.system.test_many_streams import is_idle
from tests.system.test_tiny_model import real_server

HEAD = "You are a helpful assistant who answers at length and with care. "
BODIES = [generation(f"{HEAD}Question {n}: ", 12, ignore_eos=True) for n in range(10)]


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    with real_server(model_dir, "--max_total_token_num", "4096") as server:
        yield server.await_ready()


def answers(model_dir: Path, num_rounds: int, *flags: str) -> list[list[Outcome]]:
    with real_server(model_dir, "--chunked_prefill_size", "32", *flags) as server:
        server.await_ready()
        return [asyncio.run(stream_all(server.url, BODIES)) for _ in range(num_rounds)]


def num_cached(server: Server, prompt: str, **parameters: object) -> int:
    """Ask for one token, and return how many of the prompt's were cached."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **parameters}
    usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def metric(server: Server, name: str) -> float:
    (value,) = [
        line.rpartition(" ")[2]
        for line in httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        if line.startswith(f"{name} ")
    ]
    return float(value)


def test_the_text_is_the_same_with_the_cache_off_cold_warm_and_evicting(model_dir: Path) -> None:
    (off,) = answers(model_dir, 1, "--max_total_token_num", "4096", "--disable_prefix_cache")
    assert all(outcome.finish_reason == "length" for outcome in off)
    for pool in ("4096", "200"):  # the small one holds no two prompts but for what they share
        assert answers(model_dir, 2, "--max_total_token_num", pool) == [off, off]


def test_usage_and_metrics_tell_how_much_of_the_prompt_was_cached(server: Server) -> None:
    prompt = "A prompt that only this test sends, with an end. "
    counted = metric(server, "lightserve_cached_prompt_tokens_total")

    assert num_cached(server, prompt) == 0
    assert num_cached(server, prompt) == len(prompt) - 1  # the last one is computed, for its logits
    assert num_cached(server, f"{prompt}And more.") == len(prompt)
    assert metric(server, "lightserve_cached_prompt_tokens_total") == counted + 2 * len(prompt) - 1


def test_only_requests_with_the_same_salt_share(server: Server) -> None:
    prompt = "Tenants must not find each other's prompts. "
    cached = [num_cached(server, prompt, cache_salt=salt) for salt in ("one", "two", "", "one")]
    assert cached == [0, 0, 0, len(prompt) - 1]


def test_slots_that_only_the_cache_holds_are_no_load(server: Server) -> None:
    num_cached(server, HEAD)
    wait_until(lambda: metric(server, "lightserve_kv_slots_cached") >= len(HEAD), "a report of cached slots")
    assert is_idle(server)
