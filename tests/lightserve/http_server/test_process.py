"""The real process, its real links; the test plays launcher, router and detokenizer."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from lightserve.boot import Boot, write_boot
from lightserve.children import Children
from lightserve.config import ServerConfig
from lightserve.ipc.links import Inbox, Outbox
from lightserve.ipc.messages import (
    HTTP_INDEX_SHIFT,
    AbortMsg,
    DownMsg,
    DrainMsg,
    GenerateMsg,
    LauncherInbox,
    LoadMsg,
    ReadyMsg,
    RouterInbox,
    ServeMsg,
    TextEvent,
    TextMsg,
    pack_float32,
    pack_int32,
)
from lightserve.model_config import load_model_config
from tests.server import wait_until

# Few open files to begin with, as on most systems: the process must raise the bound itself.
PROGRAM = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
runpy.run_module("lightserve.http_server.process", run_name="__main__")
"""


class Parent:
    """A server's other processes, as HTTP servers see them.

    Args:
        run_dir: The run directory.
        model_dir: Of a tiny model.
        num_servers: HTTP processes to start.
    """

    def __init__(self, run_dir: Path, model_dir: Path, num_servers: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        directory = str(run_dir)
        self.router: Inbox[RouterInbox] = Inbox(directory, "router", RouterInbox)
        self.launcher: Inbox[LauncherInbox] = Inbox(directory, "launcher", LauncherInbox)
        write_boot(_boot(directory, model_dir, listener.fileno()))
        self._children = Children({"http_server": ("-c", PROGRAM)}, directory)
        for index in range(num_servers):
            self._children.spawn("http_server", index, pass_fds=[listener.fileno()])
        self.servers = [Outbox(directory, name) for name in self._children.names]
        listener.close()

    def serve(self) -> None:
        for _ in self.servers:
            assert isinstance(self.launcher.receive(20), ReadyMsg)
        self.tell(ServeMsg(1000, 100))
        with httpx.Client(base_url=self.url) as client:
            wait_until(lambda: client.get("/health").status_code == 200, "health", timeout_s=10)

    def tell(self, message: ServeMsg | DrainMsg | DownMsg | LoadMsg | TextMsg) -> None:
        for server in self.servers:
            server.send(message)

    def next_request(self) -> GenerateMsg:
        message = self.router.receive(10)
        assert isinstance(message, GenerateMsg)
        return message

    def say(self, req_id: int, text: str, finish_reason: str | None = None) -> None:
        event = TextEvent(req_id, text, pack_int32([1]), pack_float32([0.0]), finish_reason)
        self.servers[req_id >> HTTP_INDEX_SHIFT].send(TextMsg([event]))

    def exit_codes(self) -> list[int]:
        names = self._children.names
        wait_until(lambda: not self._children.any_runs(names), "the end of every server", timeout_s=10)
        return list(self._children.reap().values())

    def close(self) -> None:
        self._children.close()
        self.router.close()
        self.launcher.close()
        for server in self.servers:
            server.close()


class Call:
    """One request in a thread of its own."""

    def __init__(self, url: str, path: str) -> None:
        self.lines: list[str] = []
        self.status = 0
        self._thread = threading.Thread(target=self._ask, args=(url, path))
        self._thread.start()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _ask(self, url: str, path: str) -> None:
        with httpx.stream("POST", f"{url}{path}", json={"inputs": "hi"}, timeout=20) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)


@pytest.fixture
def parent(tmp_path: Path, model_dir: Path) -> Iterator[Parent]:
    yield from _parent(tmp_path, model_dir, 1)


@pytest.fixture
def two_servers(tmp_path: Path, model_dir: Path) -> Iterator[Parent]:
    yield from _parent(tmp_path, model_dir, 2)


def _parent(run_dir: Path, model_dir: Path, num_servers: int) -> Iterator[Parent]:
    parent = Parent(run_dir, model_dir, num_servers)
    try:
        yield parent
    finally:
        parent.close()


def _boot(run_dir: str, model_dir: Path, listen_fd: int) -> Boot:
    return Boot(
        config=ServerConfig(api_key=None),
        model=load_model_config(model_dir),
        run_dir=run_dir,
        tokenizer_dir=str(model_dir),
        served_model_name="tiny",
        listen_fd=listen_fd,
        device="cpu",
        max_req_total_len=100,
        chunked_prefill_size=64,
        batch_max_tokens=64,
    )


def test_it_serves_from_serve_to_drain(parent: Parent) -> None:
    assert parent.launcher.receive(20) == ReadyMsg("http_server-0")
    assert httpx.get(f"{parent.url}/health").status_code == 503
    assert httpx.get(f"{parent.url}/liveness").status_code == 200
    parent.launcher.close()
    parent.tell(ServeMsg(1000, 100))
    while httpx.get(f"{parent.url}/health").status_code != 200:
        time.sleep(0.01)

    short, endless = Call(parent.url, "/generate_stream"), Call(parent.url, "/generate_stream")
    first, second = parent.next_request(), parent.next_request()
    for request in (first, second):
        parent.say(request.req_id, "a")
    parent.tell(DrainMsg(1.0))
    while httpx.get(f"{parent.url}/health").status_code != 503:
        time.sleep(0.01)
    assert httpx.post(f"{parent.url}/generate", json={"inputs": "hi"}).status_code == 503
    parent.say(first.req_id, "b", "stop")
    short.join()
    endless.join()
    ends = {line.partition(":")[2][:8] for line in (short.lines[-1], endless.lines[-1])}
    assert ends == {'{"token"', '{"error"'}
    assert parent.router.receive(5) == AbortMsg([second.req_id])
    assert parent.exit_codes() == [0]


def test_server_info_tells_settings_as_they_were_resolved(parent: Parent) -> None:
    parent.serve()
    info = httpx.get(f"{parent.url}/get_server_info").json()
    resolved = {"device": "cpu", "chunked_prefill_size": 64, "batch_max_tokens": 64, "max_req_total_len": 100}
    assert info.items() >= resolved.items()
    assert "api_key" not in info


def test_more_clients_than_the_usual_bound_on_open_files_are_served(parent: Parent) -> None:
    parent.serve()
    address = urlsplit(parent.url)
    connections = [socket.create_connection((address.hostname, address.port)) for _ in range(200)]
    assert httpx.get(f"{parent.url}/health").status_code == 200
    for connection in connections:
        connection.close()


def test_going_down_ends_every_open_request_with_the_reason(parent: Parent) -> None:
    parent.serve()
    stream, whole = Call(parent.url, "/generate_stream"), Call(parent.url, "/generate")
    for request in (parent.next_request(), parent.next_request()):
        parent.say(request.req_id, "a")
    while not stream.lines:
        time.sleep(0.01)
    parent.tell(DownMsg("its router process ended"))
    stream.join()
    whole.join()
    assert (stream.status, whole.status) == (200, 503)
    assert all("its router process ended" in call.lines[-1] for call in (stream, whole))
    assert parent.exit_codes() == [0]


def test_several_processes_share_the_port_and_the_metrics(two_servers: Parent) -> None:
    parent = two_servers
    parent.serve()
    asked = set()
    for number in range(1, 200):
        call = Call(parent.url, "/generate")
        request = parent.next_request()
        asked.add(request.req_id >> HTTP_INDEX_SHIFT)
        parent.say(request.req_id, "a", "stop")
        call.join()
        assert call.status == 200
        text = httpx.get(f"{parent.url}/metrics").text
        assert re.findall(r'^lightserve_requests_total{reason="stop"} (\S+)$', text, re.MULTILINE) == [f"{number}.0"]
        if asked == {0, 1} and number >= 10:
            break
    parent.tell(LoadMsg(3, 0, 30, 0, 40, 40, 1000, 5))
    while "lightserve_pauses_total 5.0" not in (text := httpx.get(f"{parent.url}/metrics").text):
        time.sleep(0.01)
    assert "lightserve_running_requests 3.0" in text
    assert "lightserve_kv_slots_used 30.0" in text
    assert "lightserve_pauses_total 10.0" not in text  # heard by both, counted once
