"""The launcher alone: its children are stubs that only follow its protocol."""

import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.server import Server, await_all_gone, await_port_free, running, wait_until
from tests.tiny_model import make_model_folder

SERVE_STUBS = str(Path(__file__).with_name("serve_stubs.py"))
CHILDREN = ("model_worker-0", "router", "detokenizer", "http_server-0")


def stubs(
    model_dir: Path, *flags: str, misbehave: Mapping[str, str] | None = None, **environment: str
) -> AbstractContextManager[Server]:
    command = [SERVE_STUBS, "serve", "--model_dir", str(model_dir), "--load_format", "dummy", "--port", "0", *flags]
    return running(command, {"LIGHTSERVE_STUBS": json.dumps(misbehave or {}), **environment})


def assert_nothing_left(server: Server, children: Mapping[str, int]) -> None:
    await_all_gone(children)
    assert server.run_dirs == []


def test_it_is_ready_once_all_children_are_and_says_so_once(model_dir: Path) -> None:
    with stubs(model_dir, "--max_total_token_num", "500", "--httpserver_workers", "2", "--tp", "2") as server:
        server.await_ready()

        assert server.output.count("lightserve is ready: tiny on http://127.0.0.1:") == 1
        assert "max_total_token_num 500 (a stub's pool)" in server.output
        wait_until(
            lambda: server.output.count("ServeMsg(max_total_token_num=500, max_req_total_len=500)") == 2, "serve"
        )
        server.await_children(*CHILDREN, "http_server-1", "model_worker-1")


def test_it_is_not_ready_while_a_child_is_not(model_dir: Path) -> None:
    with stubs(model_dir, misbehave={"detokenizer": "sleep"}) as server:
        server.await_children(*CHILDREN)
        time.sleep(0.5)

        assert "ready" not in server.output


def test_the_run_directory_is_private(model_dir: Path) -> None:
    with stubs(model_dir) as server:
        server.await_ready()

        (run_dir,) = server.run_dirs
        assert run_dir.stat().st_mode & 0o777 == 0o700


def test_the_api_key_is_not_on_the_process_list(model_dir: Path) -> None:
    with stubs(model_dir, "--api_key", "sesame") as server:
        children = server.await_ready().await_children(*CHILDREN)

        pids = [server.process.pid, *children.values()]
        assert not any(b"sesame" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
        assert "sesame" not in server.output


@pytest.mark.parametrize(
    ("kind", "misbehaviour", "shown"),
    [
        ("model_worker", "config_error", "failed: --dtype float16 does not suit this machine\n"),
        ("router", "raise", "failed: RuntimeError: the stub's own fault\n"),
        ("detokenizer", "kill", "was killed (SIGKILL)"),
        ("http_server", "exit", "ended with exit status 0"),
    ],
)
def test_a_child_that_fails_to_start_is_the_one_error_shown(
    model_dir: Path, kind: str, misbehaviour: str, shown: str
) -> None:
    with stubs(model_dir, misbehave={kind: misbehaviour}) as server:
        assert server.await_exit() == 1

        name = kind if kind in ("router", "detokenizer") else f"{kind}-0"
        assert server.output.count("error: ") == 1
        assert f"lightserve: error: {name} {shown}" in server.output
        assert server.run_dirs == []


def test_the_operators_error_is_shown_without_a_traceback(model_dir: Path) -> None:
    with stubs(model_dir, misbehave={"router": "config_error"}) as server:
        assert server.await_exit() == 1

        assert server.output.startswith(
            "lightserve: error: router failed: --dtype float16 does not suit this machine\n"
        )
        assert "Traceback" not in server.output


def test_a_failure_in_any_thread_of_a_child_counts(model_dir: Path) -> None:
    with stubs(model_dir, misbehave={"router": "raise_in_thread"}) as server:
        assert server.await_exit() == 1

        assert "error: router failed: RuntimeError: the stub's own fault" in server.output


def test_of_several_failures_the_one_that_caused_the_others_is_shown(model_dir: Path) -> None:
    misbehave = {"router": "raise_after model_worker-0", "http_server": "raise_after model_worker-0"}
    with stubs(model_dir, misbehave=misbehave) as server:
        children = server.await_ready().await_children(*CHILDREN)

        os.kill(children["model_worker-0"], signal.SIGKILL)

        assert server.await_exit() == 1
        assert "error: model_worker-0 was killed (SIGKILL)" in server.output


@pytest.mark.parametrize(("rank", "signum"), [(0, signal.SIGUSR1), (1, signal.SIGUSR1), (1, signal.SIGKILL)])
def test_of_two_ranks_the_one_is_blamed_that_the_other_failed_with(
    model_dir: Path, rank: int, signum: signal.Signals
) -> None:
    misbehave = {
        f"model_worker-{rank}": "raise_when_told",
        f"model_worker-{1 - rank}": f"raise_after model_worker-{rank}",
    }
    with stubs(model_dir, "--tp", "2", misbehave=misbehave) as server:
        children = server.await_ready().await_children(*CHILDREN, "model_worker-1")

        os.kill(children[f"model_worker-{rank}"], signum)

        assert server.await_exit() == 1
        how = "failed: RuntimeError: the stub's own fault" if signum == signal.SIGUSR1 else "was killed (SIGKILL)"
        assert f"lightserve: error: model_worker-{rank} {how}" in server.output


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_that_dies_later_takes_the_server_down(model_dir: Path, name: str) -> None:
    with stubs(model_dir) as server:
        children = server.await_ready().await_children(*CHILDREN)

        os.kill(children[name], signal.SIGKILL)

        assert server.await_exit() == 1
        assert f"error: {name} was killed (SIGKILL)" in server.output
        assert name == "http_server-0" or f"DownMsg(reason='its {name} process ended')" in server.output
        assert_nothing_left(server, children)
        await_port_free(server.port)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_drains_and_leaves_nothing(model_dir: Path, signum: signal.Signals) -> None:
    with stubs(model_dir, "--drain_timeout_s", "7") as server:
        children = server.await_ready().await_children(*CHILDREN)

        server.signal(signum)

        assert server.await_exit() == 0
        assert "http_server-0 DrainMsg(limit_s=7.0)" in server.output
        assert "stopping at once" not in server.output
        assert "error" not in server.output
        assert_nothing_left(server, children)
        await_port_free(server.port)


@pytest.mark.parametrize(
    ("limit_s", "reason"), [("1000", "another signal"), ("0.5", "the limit has passed")], ids=["signal", "limit"]
)
def test_draining_that_is_cut_short_lets_http_servers_end_what_is_open_and_is_logged(
    model_dir: Path, limit_s: str, reason: str
) -> None:
    with stubs(model_dir, "--drain_timeout_s", limit_s, LIGHTSERVE_STUB_DRAINS="at_once") as server:
        children = server.await_ready().await_children(*CHILDREN)
        server.signal(signal.SIGTERM)
        if reason == "another signal":
            wait_until(lambda: "DrainMsg(limit_s=1000.0)" in server.output, "draining")
            assert server.process.poll() is None
            server.signal(signal.SIGINT)

        assert server.await_exit() == 0
        assert f"launcher: stopping at once: {reason}\n" in server.output
        assert "http_server-0 DrainMsg(limit_s=0.0)" in server.output
        assert "error" not in server.output
        assert_nothing_left(server, children)


def test_http_servers_that_do_not_end_are_ended(model_dir: Path) -> None:
    with stubs(model_dir, "--drain_timeout_s", "1000", LIGHTSERVE_STUB_DRAINS="never") as server:
        children = server.await_ready().await_children(*CHILDREN)
        server.signal(signal.SIGTERM)
        wait_until(lambda: "DrainMsg(limit_s=1000.0)" in server.output, "draining")

        server.signal(signal.SIGTERM)

        assert server.await_exit() == 0
        assert_nothing_left(server, children)


def test_a_child_that_dies_while_draining_is_a_failure(model_dir: Path) -> None:
    with stubs(model_dir, LIGHTSERVE_STUB_DRAINS="never") as server:
        children = server.await_ready().await_children(*CHILDREN)
        server.signal(signal.SIGTERM)
        wait_until(lambda: "DrainMsg" in server.output, "draining")

        os.kill(children["router"], signal.SIGKILL)

        assert server.await_exit() == 1
        assert_nothing_left(server, children)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_while_loading_stops_at_once(model_dir: Path, signum: signal.Signals) -> None:
    with stubs(model_dir, misbehave={"model_worker": "sleep", "router": "sleep"}) as server:
        children = server.await_children(*CHILDREN)

        server.signal(signum)

        assert server.await_exit() == 0
        assert "error" not in server.output
        assert_nothing_left(server, children)


def test_stop_signals_sent_to_every_process_still_drain(model_dir: Path) -> None:
    """A terminal's Ctrl-C, and what service managers do."""
    with stubs(model_dir) as server:
        children = server.await_ready().await_children(*CHILDREN)

        for signum in (signal.SIGINT, signal.SIGTERM):
            for pid in children.values():
                os.kill(pid, signum)
        server.signal(signal.SIGTERM)

        assert server.await_exit() == 0
        assert "http_server-0 DrainMsg" in server.output


@pytest.mark.parametrize("misbehave", [{}, {"model_worker": "sleep", "router": "sleep"}])
def test_the_children_of_a_killed_launcher_die(model_dir: Path, misbehave: Mapping[str, str]) -> None:
    with stubs(model_dir, misbehave=misbehave) as server:
        children = server.await_children(*CHILDREN)

        server.signal(signal.SIGKILL)

        server.await_exit()
        await_all_gone(children)


def test_a_port_in_use_fails_at_once_and_is_named(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with stubs(model_dir, "--port", str(port)) as server:
            assert server.await_exit() == 1

            assert server.output == f"lightserve: error: --port {port} is already in use on 127.0.0.1\n"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--model_dir", "/no/such/model"], "--model_dir /no/such/model: no such file or folder"),
        (["--tokenizer", "/no/such/tokenizer"], "--tokenizer /no/such/tokenizer: no such file or folder"),
        (["--max_req_total_len", "4096"], "--max_req_total_len 4096 exceeds the model's context of 2048 tokens"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_before_anything_starts(
    model_dir: Path, flags: list[str], complaint: str
) -> None:
    with stubs(model_dir, *flags) as server:
        assert server.await_exit() == 1

        assert server.output == f"lightserve: error: {complaint}\n"
        assert server.run_dirs == []


def test_a_folder_with_a_config_alone_is_refused_with_both_ways_out_before_anything_starts(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "shape")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with stubs(folder, "--load_format", "auto") as server:
        assert server.await_exit() == 1

        assert server.output == (
            f"lightserve: error: --model_dir {folder}: the folder has no tokenizer.json; for a shape without weights "
            "add --load_format dummy, else name a tokenizer with --tokenizer\n"
        )
        assert server.run_dirs == []
