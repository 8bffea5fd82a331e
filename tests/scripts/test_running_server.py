"""A server that a script starts: why it did not become ready, and that nothing of it stays."""

import subprocess
from pathlib import Path

import pytest
from script_tools.running_server import ServerDiedError, running_server

from tests.server import is_alive

READY = "print('lightserve is ready: tiny on http://127.0.0.1:1234, max_total_token_num 5', flush=True)"
WILLING = f"import time; {READY}; time.sleep(60)"
STUBBORN = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}; time.sleep(60)"


def test_a_server_that_does_not_start_is_an_error_with_its_exit_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(ServerDiedError, match="ended with exit status 1"),
        running_server(["--model_dir", str(tmp_path / "nowhere")]),
    ):
        pass
    assert "no such file or folder" in capfd.readouterr().err


def test_a_server_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("script_tools.running_server._START_LIMIT_S", 0.2)
    with (
        pytest.raises(ServerDiedError, match=r"not ready within 0.2 s"),
        running_server([], command=["-c", "import time; time.sleep(60)"]),
    ):
        pass


def test_a_server_that_does_not_stop_is_killed_and_its_url_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("script_tools.running_server._STOP_LIMIT_S", 0.2)
    with running_server([], command=["-c", STUBBORN]) as server:
        assert server.url == "http://127.0.0.1:1234"
        assert is_alive(server.pid)
    assert not is_alive(server.pid)


def test_a_block_that_fails_ends_the_server_too() -> None:
    with pytest.raises(subprocess.SubprocessError), running_server([], command=["-c", WILLING]) as server:
        raise subprocess.SubprocessError
    assert not is_alive(server.pid)
