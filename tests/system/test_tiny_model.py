"""Whole servers with the real model worker and a tiny model of random weights."""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from tests.client import OpenStreams, Outcome, generation, open_client, stream_all
from tests.server import Server, await_all_gone, running
from tests.system.fake_server import CHILDREN

BODIES = [generation(f"prompt number {n} ", 24, ignore_eos=True) for n in range(12)]


def real_server(
    model_dir: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    command = ["-m", "lightserve", "serve", "--model_dir", str(model_dir), "--load_format", "dummy", "--port", "0"]
    return running([*command, "--device", "cpu", "--dtype", "float32", *flags], environment)


@pytest.mark.parametrize("flags", [(), ("--tp", "2")])
def test_an_answer_is_the_same_alone_in_a_crowd_streamed_and_whole(model_dir: Path, flags: tuple[str, ...]) -> None:
    with real_server(model_dir, "--max_total_token_num", "160", *flags) as server:
        children = server.await_ready().await_children(*CHILDREN)

        crowd = asyncio.run(stream_all(server.url, BODIES))
        alone = [asyncio.run(stream_all(server.url, [body])) for body in BODIES[:3]]
        whole = [httpx.post(f"{server.url}/generate", json=body, timeout=60).json() for body in BODIES[:3]]

        assert all(outcome.finish_reason == "length" for outcome in crowd)
        assert [outcome for (outcome,) in alone] == crowd[:3]
        assert [reply["generated_text"][0] for reply in whole] == [outcome.text for outcome in crowd[:3]]

        server.signal(signal.SIGTERM)
        assert server.await_exit() == 0
        await_all_gone(children)
        assert list(server.temp_dir.iterdir()) == []


def test_a_killed_worker_ends_the_server_and_every_request_with_an_error(model_dir: Path) -> None:
    async def run(server: Server) -> list[Outcome]:
        async with open_client(server.url) as client:
            streams = OpenStreams(client, [generation(f"client {n} ", 1900, ignore_eos=True) for n in range(4)])
            await streams.until_all_have_text()
            os.kill(server.children()["model_worker-0"], signal.SIGKILL)
            return await streams.outcomes()

    with real_server(model_dir) as server:
        children = server.await_ready().await_children(*CHILDREN)

        outcomes = asyncio.run(run(server))

        assert {outcome.error for outcome in outcomes} == {"server_down"}
        assert server.await_exit() == 1
        assert "lightserve: error: model_worker-0 was killed (SIGKILL)" in server.output
        assert "Traceback" not in server.output
        await_all_gone(children)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [(("--tp", "3"), "tp"), (("--max_total_token_num", "1000000000000"), "--max_total_token_num")],
)
def test_what_the_worker_refuses_is_the_one_error_shown(model_dir: Path, flags: tuple[str, ...], shown: str) -> None:
    with real_server(model_dir, *flags) as server:
        assert server.await_exit() == 1

        (error,) = [line for line in server.output.splitlines() if line.startswith("lightserve: error: ")]
        assert shown in error
        assert "Traceback" not in server.output
        assert list(server.temp_dir.iterdir()) == []
