"""What clients say about the order and the end of their requests, from HTTP to the router and back."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.client import OpenStreams, Outcome, generation, get_json, open_client, stream, stream_all
from tests.server import Server, wait_until
from tests.system.fake_server import fake_server
from tests.system.test_many_streams import SLOW, is_idle

POOL = 2000
LONG_SLOTS = 1500 + 490 - 1
LONG = generation("x" * 1500, 490)  # ten seconds


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    with fake_server(model_dir, "--max_total_token_num", str(POOL), script=SLOW) as server:
        yield server.await_ready()


def token_load(server: Server) -> dict[str, float]:
    return {name: float(str(share)) for name, share in get_json(server.url, "/token_load").items()}


def test_a_request_that_runs_beyond_its_timeout_ends_with_504_and_frees_its_slots(server: Server) -> None:
    body = generation("x" * 1500, 490, timeout=1.5)

    whole = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    (streamed,) = asyncio.run(stream_all(server.url, [body]))

    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
    assert streamed.error == "timeout"
    assert streamed.text  # what came in time was sent
    wait_until(lambda: is_idle(server), "an empty pool")


def test_a_request_that_waits_beyond_its_timeout_ends_with_504(server: Server) -> None:
    async def run() -> httpx.Response:
        async with open_client(server.url) as client:
            streams = OpenStreams(client, [LONG])
            await streams.until_all_have_text()
            body = {"prompt": "late" * 200, "max_tokens": 20, "timeout": 0.3, "stream": True}
            refused = await client.post("/v1/completions", json=body)
            streams.leave()
            return refused

    refused = asyncio.run(run())

    assert (refused.status_code, refused.json()["error"]["code"]) == (504, "timeout")
    wait_until(lambda: is_idle(server), "an empty pool")


def test_the_higher_priority_goes_first_and_the_load_says_who_waits(server: Server) -> None:
    """Each of those who wait needs more than half the pool, so they run one after the other."""
    priorities = {"a": 0, "b": 2, "c": 1, "d": -1}
    all_slots = LONG_SLOTS + len(priorities) * (1010 + 8 - 1)
    finished = ""

    async def ask(client: httpx.AsyncClient, letter: str) -> Outcome:
        nonlocal finished
        outcome = await stream(client, generation(letter * 1010, 8, priority=priorities[letter]))
        finished += letter
        return outcome

    async def run() -> dict[str, float]:
        async with open_client(server.url) as client:
            first = OpenStreams(client, [LONG])
            await first.until_all_have_text()
            waiting = [asyncio.create_task(ask(client, letter)) for letter in priorities]
            while (load := token_load(server))["logical_max_load"] < all_slots / POOL:
                await asyncio.sleep(0.02)
            first.leave()
            assert await asyncio.gather(*waiting) == [Outcome(letter * 8, "length") for letter in priorities]
        return load

    load = asyncio.run(run())

    assert finished == "bcad"
    assert 1500 / POOL < load["current_load"] < load["dynamic_max_load"] == LONG_SLOTS / POOL
    assert load["logical_max_load"] == all_slots / POOL
    wait_until(lambda: is_idle(server), "an empty pool")
