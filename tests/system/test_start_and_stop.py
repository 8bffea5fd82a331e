"""Signals at every stage, several servers on one host, odd directories."""

import asyncio
import contextlib
import shlex
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.client import OpenStreams, Outcome, generation, health, open_client, stream, stream_all
from tests.fakes import FakeWorkerScript
from tests.server import Server, await_all_gone, await_port_free, cpu_seconds, running, short_dir, wait_until
from tests.system.fake_server import CHILDREN, fake_server
from tests.tiny_model import make_model_folder

SLOW = FakeWorkerScript(step_s=0.02)
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def shared_dir() -> Iterator[Path]:
    with short_dir() as path:
        yield Path(path)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("has_chat_template", [True, False])
def test_the_command_printed_with_the_ready_line_works(tmp_path: Path, has_chat_template: bool) -> None:
    folder = make_model_folder(tmp_path / "it's a model")
    if not has_chat_template:
        (folder / "tokenizer_config.json").unlink()
    with fake_server(folder, "--api_key", "sesame") as server:
        server.await_ready()
        (line,) = [line for line in server.output.splitlines() if line.startswith("curl ")]

        _, url, _, content_type, _, key, _, body = shlex.split(line)
        headers = dict(header.split(": ") for header in (content_type, key.replace("YOUR_API_KEY", "sesame")))
        reply = httpx.post(url, headers=headers, content=body, timeout=60)

        assert reply.status_code == 200
        assert reply.json()["model"] == "it's a model"


def test_health_is_503_until_the_model_is_loaded(model_dir: Path, tmp_path: Path) -> None:
    port = free_port()
    loading = tmp_path / "loading"
    loading.touch()
    with fake_server(model_dir, script=FakeWorkerScript(loads_while=str(loading)), port=port) as server:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: health(url) is not None, "an HTTP server")

        assert health(url) == 503
        assert httpx.get(f"{url}/liveness").status_code == 200
        refused = httpx.post(f"{url}/generate", json=generation("hello", 1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_starting")

        loading.unlink()
        server.await_ready()
        wait_until(lambda: health(url) == 200, "health")


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        (FakeWorkerScript(config_error="--dtype float16: no"), "model_worker-0 failed: --dtype float16: no\n"),
        (FakeWorkerScript(load_error="out of memory"), "model_worker-0 failed: RuntimeError: out of memory\n"),
    ],
)
def test_a_worker_that_cannot_load_is_the_one_error_shown(
    model_dir: Path, script: FakeWorkerScript, shown: str
) -> None:
    with fake_server(model_dir, script=script) as server:
        assert server.await_exit() == 1

        assert f"lightserve: error: {shown}" in server.output
        assert server.output.count("lightserve: error: ") == 1
        assert server.output.count("Traceback") == (script.load_error is not None)
        assert server.run_dirs == []


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_stop_signal_while_the_model_loads_stops_at_once(model_dir: Path, signum: signal.Signals) -> None:
    with fake_server(model_dir, script=FakeWorkerScript(load_s=1000)) as server:
        children = server.await_children(*CHILDREN)

        server.signal(signum)

        assert server.await_exit() == 0
        assert "rror" not in server.output
        assert_nothing_left(server, children)


@pytest.mark.parametrize("script", [FakeWorkerScript(load_s=1000), FakeWorkerScript()])
def test_the_children_of_a_killed_launcher_die_and_the_port_is_free(model_dir: Path, script: FakeWorkerScript) -> None:
    port = free_port()
    with fake_server(model_dir, script=script, port=port) as server:
        children = server.await_children(*CHILDREN)
        if not script.load_s:
            server.await_ready()

        server.signal(signal.SIGKILL)

        server.await_exit()
        await_all_gone(children)
        await_port_free(port)


def test_a_stop_signal_while_the_default_model_is_fetched_stops_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:  # accepts, and never answers
        environment = {
            "XDG_CACHE_HOME": str(tmp_path),
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "PIP_NO_CACHE_DIR": "1",
        }
        with running(["-m", "lightserve", "serve", "--port", "0"], environment) as server:
            wait_until(lambda: bool(server.descendants()), "pip")
            downloaders = server.descendants()

            server.signal(signal.SIGTERM)

            assert server.await_exit() == 0
            await_all_gone(downloaders)
            assert list(server.temp_dir.iterdir()) == []


def test_an_idle_server_stops_at_a_signal_and_can_be_started_again_at_once(model_dir: Path) -> None:
    port = free_port()
    for _ in range(2):
        with fake_server(model_dir, port=port) as server:
            children = server.await_ready().await_children(*CHILDREN)

            server.signal(signal.SIGINT)

            assert server.await_exit() == 0
            assert "rror" not in server.output
            assert_nothing_left(server, children)


def test_an_idle_server_uses_no_processor(model_dir: Path) -> None:
    with fake_server(model_dir) as server:
        children = server.await_ready().await_children(*CHILDREN)
        asyncio.run(stream_all(server.url, [generation("warm up ", 5)]))
        pids = [server.process.pid, *children.values()]

        before = sum(map(cpu_seconds, pids))
        time.sleep(3)
        used = sum(map(cpu_seconds, pids)) - before

        assert used <= 0.03  # 1 % of a core


def test_a_busy_server_finishes_what_is_open_refuses_what_is_new_and_has_an_end(model_dir: Path) -> None:
    async def run(server: Server) -> tuple[list[Outcome], Outcome]:
        async with open_client(server.url) as client:
            streams = OpenStreams(client, [generation("short ", 60), generation("endless ", 1900)])
            await streams.until_all_have_text()
            server.signal(signal.SIGTERM)
            while health(server.url) == 200:
                await asyncio.sleep(0.02)
            late = await stream(client, generation("late ", 1))
            return await streams.outcomes(), late

    with fake_server(model_dir, "--drain_timeout_s", "5", script=SLOW) as server:
        children = server.await_ready().await_children(*CHILDREN)

        (short, endless), late = asyncio.run(run(server))

        assert short == Outcome("short " * 10, "length")
        assert endless.error == "server_draining"
        assert late.error == "server_draining"
        assert server.await_exit() == 0
        assert_nothing_left(server, children)


def test_a_second_signal_ends_what_is_open_with_an_error(model_dir: Path) -> None:
    async def run(server: Server) -> tuple[list[Outcome], httpx.Response]:
        async with open_client(server.url) as client:
            whole = asyncio.create_task(client.post("/generate", json=generation("endless ", 1900)))
            streams = OpenStreams(client, [generation("endless ", 1900)])
            await streams.until_all_have_text()
            server.signal(signal.SIGINT)
            while health(server.url) == 200:
                await asyncio.sleep(0.02)
            server.signal(signal.SIGINT)
            return await streams.outcomes(), await whole

    with fake_server(model_dir, "--drain_timeout_s", "1000", script=SLOW) as server:
        children = server.await_ready().await_children(*CHILDREN)

        (streamed,), whole = asyncio.run(run(server))

        assert streamed.error == "server_draining"
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "server_draining")
        assert server.await_exit() == 0
        assert "launcher: stopping at once: another signal\n" in server.output
        assert_nothing_left(server, children)


def test_the_children_of_a_launcher_killed_in_the_middle_of_work_die(model_dir: Path) -> None:
    async def run(server: Server) -> list[Outcome]:
        async with open_client(server.url) as client:
            streams = OpenStreams(client, [generation("endless ", 1900)])
            await streams.until_all_have_text()
            server.signal(signal.SIGKILL)
            return await streams.outcomes()

    with fake_server(model_dir, script=SLOW) as server:
        children = server.await_ready().await_children(*CHILDREN)

        asyncio.run(run(server))

        server.await_exit()
        await_all_gone(children)
        await_port_free(server.port)


def test_four_servers_started_together_answer_only_their_own_requests(model_dir: Path, shared_dir: Path) -> None:
    shared = {"TMPDIR": str(shared_dir)}
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(fake_server(model_dir, "--served_model_name", f"model-{n}", environment=shared))
            for n in range(4)
        ]
        for server in servers:
            server.await_ready()

        for n, server in enumerate(servers):
            models = httpx.get(f"{server.url}/v1/models").json()["data"]
            assert [model["id"] for model in models] == [f"model-{n}"]
            (outcome,) = asyncio.run(stream_all(server.url, [generation(f"server {n} ", 9)]))
            assert outcome == Outcome(f"server {n} ", "length")

        with fake_server(model_dir, port=servers[0].port, environment=shared) as fifth:
            assert fifth.await_exit() == 1
            assert f"--port {servers[0].port} is already in use" in fifth.output
        assert health(servers[0].url) == 200


@pytest.mark.parametrize("name", ["t" * 150, "with a space", "read-only"])
def test_any_temporary_directory_will_do(model_dir: Path, tmp_path: Path, name: str) -> None:
    temp_dir = tmp_path / name
    temp_dir.mkdir(mode=0o500 if name == "read-only" else 0o700)
    with fake_server(model_dir, environment={"TMPDIR": str(temp_dir)}) as server:
        server.await_ready()

        (outcome,) = asyncio.run(stream_all(server.url, [generation("hello ", 6)]))
        assert outcome == Outcome("hello ", "length")


def test_a_model_folder_with_a_long_path_will_do(model_dir: Path, tmp_path: Path) -> None:
    long_path = tmp_path / ("m" * 200)
    long_path.symlink_to(model_dir)
    with fake_server(long_path) as server:
        server.await_ready()

        assert health(server.url) == 200


def test_what_killed_servers_left_is_removed_by_the_next_start_beside_a_live_one(
    model_dir: Path, shared_dir: Path
) -> None:
    shared = {"TMPDIR": str(shared_dir)}
    with fake_server(model_dir, environment=shared) as live:
        live.await_ready()
        for _ in range(2):
            with fake_server(model_dir, environment=shared) as killed:
                killed.await_children(*CHILDREN)
                killed.signal(signal.SIGKILL)
                killed.await_exit()
        assert len(list(shared_dir.iterdir())) == 2  # the live one's, and the last killed one's

        with fake_server(model_dir, environment=shared) as next_one:
            next_one.await_ready()
            assert len(list(shared_dir.iterdir())) == 2
            assert health(live.url) == 200


def assert_nothing_left(server: Server, children: dict[str, int]) -> None:
    await_all_gone(children)
    assert list(server.temp_dir.iterdir()) == []
    assert not any(Path("/dev/shm").glob("lightserve*"))
