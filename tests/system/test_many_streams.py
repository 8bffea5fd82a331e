"""A crowd against a pool that holds only a few at a time."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.client import OpenStreams, Outcome, generation, get_json, open_client, stream_all
from tests.fakes import FakeWorkerScript
from tests.server import Server, wait_until
from tests.system.fake_server import fake_server

NEW_TOKENS = 40
SLOW = FakeWorkerScript(step_s=0.02)


def prompt(number: int) -> str:
    return f"client {number:03} says so; "


def answer(number: int, num_tokens: int = NEW_TOKENS) -> str:
    """The fake repeats the prompt, one byte a token."""
    return (prompt(number) * num_tokens)[:num_tokens]


def is_idle(server: Server) -> bool:
    load = get_json(server.url, "/token_load")
    return load == {"current_load": 0.0, "logical_max_load": 0.0, "dynamic_max_load": 0.0}


@pytest.mark.parametrize("num_http_servers", [1, 2])
def test_64_streams_over_room_for_four_all_get_their_own_answer(model_dir: Path, num_http_servers: int) -> None:
    flags = ("--max_total_token_num", "256", "--httpserver_workers", str(num_http_servers))
    with fake_server(model_dir, *flags) as server:
        server.await_ready()

        outcomes = asyncio.run(stream_all(server.url, [generation(prompt(n), NEW_TOKENS) for n in range(64)]))

        assert outcomes == [Outcome(answer(n), "length") for n in range(64)]
        wait_until(lambda: is_idle(server), "an empty pool")


def test_prompts_that_begin_alike_share_slots_and_still_get_their_own_answer(model_dir: Path) -> None:
    """The fake checks that every slot it is told to share holds what the request would have written there."""
    prompts = [f"All of us begin with the same words; number {n:03} " for n in range(40)]
    with fake_server(model_dir, "--max_total_token_num", "300") as server:
        server.await_ready()

        for _ in range(2):
            outcomes = asyncio.run(stream_all(server.url, [generation(prompt, len(prompt)) for prompt in prompts]))

            assert outcomes == [Outcome(prompt, "length") for prompt in prompts]
        wait_until(lambda: is_idle(server), "an empty pool")


def test_streamed_and_whole_answers_are_the_same_text(model_dir: Path) -> None:
    with fake_server(model_dir) as server:
        server.await_ready()
        body = generation("naïve “quotes” and 🦙 ", 60, stop_sequences=["llama"])

        (streamed,) = asyncio.run(stream_all(server.url, [body]))
        whole = httpx.post(f"{server.url}/generate", json=body).json()

        assert whole["generated_text"] == [streamed.text]
        assert whole["finish_reason"] == streamed.finish_reason == "length"


def test_clients_that_vanish_free_their_slots(model_dir: Path) -> None:
    async def vanish(url: str) -> None:
        async with open_client(url) as client:
            streams = OpenStreams(client, [generation(prompt(n), 1000) for n in range(3)])
            await streams.until_all_have_text()
            assert float(str(get_json(url, "/token_load")["current_load"])) > 0
            streams.leave()

    with fake_server(model_dir, script=SLOW) as server:
        server.await_ready()
        asyncio.run(vanish(server.url))

        wait_until(lambda: is_idle(server), "an empty pool")
        (outcome,) = asyncio.run(stream_all(server.url, [generation(prompt(9), 5)]))
        assert outcome == Outcome(answer(9, 5), "length")


def test_clients_that_vanish_while_they_wait_leave_the_queue(model_dir: Path) -> None:
    async def vanish(url: str) -> None:
        async with open_client(url) as client:
            streams = OpenStreams(client, [generation(prompt(n), 150) for n in range(20)])
            while float(str(get_json(url, "/token_load")["logical_max_load"])) < 10:
                await asyncio.sleep(0.02)
            streams.leave()

    with fake_server(model_dir, "--max_total_token_num", "256", script=SLOW) as server:
        server.await_ready()
        asyncio.run(vanish(server.url))

        wait_until(lambda: is_idle(server), "an empty pool and queue")


def test_an_impatient_client_of_a_whole_answer_frees_its_slots(model_dir: Path) -> None:
    with fake_server(model_dir, script=SLOW) as server:
        server.await_ready()

        for path, body in {
            "/generate": generation("hello ", 1000),
            "/v1/completions": {"prompt": "hello ", "max_tokens": 1000},
            "/v1/chat/completions": {
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 1000,
                "ignore_eos": True,  # the fake repeats the end-of-turn marks of its prompt
            },
        }.items():
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + path, json=body, timeout=0.5)
            wait_until(lambda: is_idle(server), f"an empty pool after {path}")


def test_a_request_whose_logits_are_not_finite_fails_alone(model_dir: Path) -> None:
    script = FakeWorkerScript(nan_prompt_id=ord("#") - ord("!"))  # the byte alphabet begins with "!"
    with fake_server(model_dir, script=script) as server:
        server.await_ready()

        broken, sound = asyncio.run(stream_all(server.url, [generation("bad # one", 20), generation(prompt(1), 20)]))

        assert broken.error is not None
        assert broken.is_over
        assert sound == Outcome(answer(1, 20), "length")
        wait_until(lambda: is_idle(server), "an empty pool")
