import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rpyc

from lightserve.errors import ConfigError
from lightserve.ipc.links import Inbox
from lightserve.ipc.messages import ReadyMsg
from lightserve.ipc.worker_link import WorkerListener, connect_worker, serve_worker


class Echo(rpyc.Service):  # type: ignore[misc]
    def __init__(self) -> None:
        self.secret = b"not for the other side"

    def exposed_echo(self, payload: bytes) -> bytes:
        return payload

    def exposed_take_long(self) -> bytes:
        time.sleep(1.2)
        return b"done"

    def exposed_things(self) -> list[int]:
        return [1, 2]

    def exposed_refuse(self) -> None:
        raise ConfigError("--tp 3: no")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "worker")


@pytest.fixture
def impatient_rpyc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rpyc.core.protocol.DEFAULT_CONFIG, "sync_request_timeout", 0.1)  # it is half a minute


@pytest.fixture
def connection(path: str) -> Iterator["rpyc.Connection"]:
    thread = threading.Thread(target=WorkerListener(path).serve, args=(Echo(),), daemon=True)
    thread.start()
    connection = connect_worker(path)
    yield connection
    connection.close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("num_bytes", [0, 1, 2_999, 3_001, 63_990, 64_000, 65_536, 1 << 20])
def test_bytes_of_any_length_come_back_unchanged(connection: "rpyc.Connection", num_bytes: int) -> None:
    payload = os.urandom(num_bytes)

    assert [connection.root.echo(payload) for _ in range(3)] == [payload] * 3


def test_an_operators_mistake_arrives_as_one_and_the_next_call_works(connection: "rpyc.Connection") -> None:
    with pytest.raises(ConfigError, match="--tp 3: no"):
        connection.root.refuse()

    assert connection.root.echo(b"on") == b"on"


def test_nothing_but_the_methods_meant_for_it_is_exposed(connection: "rpyc.Connection") -> None:
    with pytest.raises(AttributeError):
        _ = connection.root.secret


def test_a_worker_that_says_that_it_is_ready_takes_calls(tmp_path: Path) -> None:
    launcher: Inbox[ReadyMsg] = Inbox(str(tmp_path), "launcher", ReadyMsg)
    thread = threading.Thread(target=serve_worker, args=(str(tmp_path), "model_worker-1", Echo()), daemon=True)
    thread.start()
    assert launcher.receive(timeout_s=10) == ReadyMsg("model_worker-1")
    connection = connect_worker(str(tmp_path / "model_worker-1"))
    assert connection.root.echo(b"on") == b"on"
    connection.close()
    thread.join(10)
    launcher.close()


def test_nothing_is_pickled(connection: "rpyc.Connection") -> None:
    with pytest.raises(ValueError, match="pickling is disabled"):
        rpyc.classic.obtain(connection.root.things())


@pytest.mark.usefixtures("impatient_rpyc")
def test_a_call_may_take_as_long_as_it_takes(connection: "rpyc.Connection") -> None:
    assert connection.root.take_long() == b"done"


def test_where_nobody_listens_nobody_answers(path: str) -> None:
    with pytest.raises(FileNotFoundError):
        connect_worker(path)


@pytest.mark.parametrize("last_words", [b"", b"\x00\x00", b"\x00\x00\x01\x00\x00cut o"])
def test_a_worker_that_leaves_in_the_middle_of_a_message_is_an_end_of_file(path: str, last_words: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1)
        connection = connect_worker(path)
        worker, _ = listener.accept()
    with worker:
        worker.sendall(last_words)

    with pytest.raises(EOFError):
        _ = connection.root
