"""The prefix cache under a real model worker: it changes what is computed, never what is said."""

import asyncio
from pathlib import Path

from tests.client import Outcome, generation, stream_all
from tests.system.test_tiny_model import real_server

HEAD = "You are a helpful assistant who answers at length and with care. "
BODIES = [generation(f"{HEAD}Question {n}: ", 12, ignore_eos=True) for n in range(10)]


def answers(model_dir: Path, num_rounds: int, *flags: str) -> list[list[Outcome]]:
    with real_server(model_dir, "--chunked_prefill_size", "32", *flags) as server:
        server.await_ready()
        return [asyncio.run(stream_all(server.url, BODIES)) for _ in range(num_rounds)]


def test_the_text_is_the_same_with_the_cache_off_cold_warm_and_evicting(model_dir: Path) -> None:
    (off,) = answers(model_dir, 1, "--max_total_token_num", "4096", "--disable_prefix_cache")
    assert all(outcome.finish_reason == "length" for outcome in off)
    for pool in ("4096", "200"):  # the small one holds no two prompts but for what they share
        assert answers(model_dir, 2, "--max_total_token_num", pool) == [off, off]
