"""What breaks while a server runs, and that everybody is told."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.client import OpenStreams, Outcome, generation, health, open_client, stream
from tests.fakes import FakeWorkerScript
from tests.server import Server, await_all_gone, await_port_free, wait_until
from tests.system.fake_server import CHILDREN, fake_server

SLOW = FakeWorkerScript(step_s=0.02)
ROOM_FOR_ALL = ("--max_total_token_num", "20000")
BODIES = [generation(f"client {n} ", 1500) for n in range(8)]


async def outcomes_when(server: Server, name: str, signum: signal.Signals) -> list[Outcome]:
    """What clients with open streams see after a child got a signal."""
    async with open_client(server.url) as client:
        streams = OpenStreams(client, BODIES)
        await streams.until_all_have_text()
        os.kill(server.children()[name], signum)
        return await streams.outcomes()


@pytest.mark.parametrize("name", [name for name in CHILDREN if name != "http_server-0"])
def test_when_a_child_is_killed_every_open_request_ends_with_an_error(model_dir: Path, name: str) -> None:
    with fake_server(model_dir, *ROOM_FOR_ALL, script=SLOW) as server:
        children = server.await_ready().await_children(*CHILDREN)

        outcomes = asyncio.run(outcomes_when(server, name, signal.SIGKILL))

        assert {outcome.error for outcome in outcomes} == {"server_down"}
        assert_down_because(server, name, children)


def test_when_an_http_server_is_killed_its_clients_are_cut_off_and_the_server_ends(model_dir: Path) -> None:
    with fake_server(model_dir, *ROOM_FOR_ALL, script=SLOW) as server:
        children = server.await_ready().await_children(*CHILDREN)

        outcomes = asyncio.run(outcomes_when(server, "http_server-0", signal.SIGKILL))

        assert {outcome.error for outcome in outcomes} == {"cut"}
        assert_down_because(server, "http_server-0", children)


def assert_down_because(server: Server, name: str, children: dict[str, int]) -> None:
    assert server.await_exit() == 1
    errors = [line for line in server.output.splitlines() if "error: " in line or "ERROR" in line]
    assert errors[0].startswith(f"lightserve: error: {name} was killed (SIGKILL)")
    assert server.output.count("lightserve: error: ") == 1
    await_all_gone(children)
    assert server.run_dirs == []
    await_port_free(server.port)


def test_a_worker_that_dies_in_a_step_is_blamed_for_it(model_dir: Path) -> None:
    async def run(url: str) -> Outcome:
        async with open_client(url) as client:
            return await stream(client, generation("hello ", 100))

    with fake_server(model_dir, script=FakeWorkerScript(kill_at_step=5)) as server:
        server.await_ready()

        assert asyncio.run(run(server.url)).error == "server_down"

        assert server.await_exit() == 1
        assert "lightserve: error: model_worker-0 was killed (SIGKILL)" in server.output
        assert "Traceback" not in server.output


def test_the_health_of_a_server_whose_worker_hangs_turns_bad_and_that_of_an_idle_one_does_not(model_dir: Path) -> None:
    async def open_a_request(url: str) -> None:
        async with open_client(url) as client:
            streams = OpenStreams(client, [generation("hello ", 100)])
            while health(url) == 200:
                await asyncio.sleep(0.5)
            streams.leave()

    with fake_server(model_dir, script=SLOW) as server:
        worker = server.await_ready().await_children("model_worker-0")["model_worker-0"]
        os.kill(worker, signal.SIGSTOP)
        assert health(server.url) == 200

        asyncio.run(asyncio.wait_for(open_a_request(server.url), timeout=60))

        os.kill(worker, signal.SIGCONT)
        wait_until(lambda: health(server.url) == 200, "recovery")
