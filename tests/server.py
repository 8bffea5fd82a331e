"""A whole server as a process of its own, and what it leaves behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 100.0  # generous: the machine may be busy with other tests


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait for a fact."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


class Server:
    """One running launcher with its children.

    Args:
        command: What to run; flags included.
        environment: Added to this process's.
        temp_dir: Where its run directory goes.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], temp_dir: Path) -> None:
        self.temp_dir = temp_dir
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-P", *command],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temp_dir), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self._lines.append(line)

    @property
    def output(self) -> str:
        """All that was printed so far, by the launcher and its children."""
        return "".join(self._lines)

    @property
    def url(self) -> str:
        """Where it serves, from the line that says it is ready."""
        found = re.search(r"lightserve is ready: .* on (http://\S+),", self.output)
        if found is None:
            raise AssertionError(f"not ready:\n{self.output}")
        return found[1]

    @property
    def port(self) -> int:
        """The port of ``url``."""
        return int(self.url.rpartition(":")[2])

    @property
    def run_dirs(self) -> list[Path]:
        """Run directories under ``temp_dir``."""
        return list(self.temp_dir.glob("lightserve-*"))

    def await_ready(self) -> "Server":
        """Wait for the ready line."""
        wait_until(lambda: "lightserve is ready" in self.output or self.process.poll() is not None, "ready line")
        assert self.url
        return self

    def await_exit(self) -> int:
        """Wait for the launcher's end, and that of its output, which every child holds open."""
        status = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return status

    def children(self) -> dict[str, int]:
        """Process ids of the children that have named themselves, by name."""
        return {
            title.removeprefix("lightserve "): pid
            for pid in _children_of(self.process.pid)
            if (title := _title(pid)).startswith("lightserve ")
        }

    def descendants(self) -> dict[str, int]:
        """Process ids of all children, by their command lines."""
        return {_title(pid): pid for pid in _children_of(self.process.pid)}

    def await_children(self, *names: str) -> dict[str, int]:
        """Wait until these children have named themselves."""
        wait_until(lambda: set(names) <= self.children().keys(), f"children {names}")
        return self.children()

    def signal(self, signum: signal.Signals) -> None:
        """Send the launcher a signal."""
        self.process.send_signal(signum)

    def close(self) -> None:
        """Make an end of it."""
        if self.process.poll() is None:
            self.process.kill()
        self.await_exit()


def short_dir() -> "tempfile.TemporaryDirectory[str]":
    """Make a directory whose path leaves room for the names of sockets."""
    return tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp")


@contextmanager
def running(command: list[str], environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run a server; nothing of it survives the block."""
    with short_dir() as temp_dir:
        server = Server(command, environment or {}, Path(temp_dir))
        try:
            yield server
        finally:
            server.close()
            print(server.output)  # pytest shows it when the test fails


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def await_all_gone(pids: Mapping[str, int]) -> None:
    """Wait until none of these processes runs."""
    wait_until(lambda: not any(is_alive(pid) for pid in pids.values()), f"end of {pids}", timeout_s=10)


def await_port_free(port: int) -> None:
    """Wait until a server can listen on a port.

    The last thread of a killed process, or a connection of another test that got the number, may hold it for a moment.
    """
    wait_until(lambda: _is_port_free(port), f"port {port} to be free", timeout_s=10)


def _is_port_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0 ")
    except (FileNotFoundError, ProcessLookupError):
        return ""
