"""The launcher's child processes: started so that none can outlive it, watched for their end, killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence

from lightserve.child import process_name
from lightserve.stop_signals import stop_signals_blocked


class Children:
    """Child processes by name.

    Each one's standard input is a pipe that closes when this process ends, however it ends: see ``child.run_child``.

    Args:
        commands: For each kind of child, the arguments to Python that run it.
        run_dir: Their run directory.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], run_dir: str) -> None:
        self._commands = commands
        self._run_dir = run_dir
        self._lifeline_read, self._lifeline_write = os.pipe()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._reaped: set[str] = set()

    def spawn(self, kind: str, index: int, pass_fds: Collection[int] = ()) -> str:
        """Start one child and return its name."""
        name = process_name(kind, index)
        # -P: the current directory must not offer its own modules, such as this repository's ``kernels``.
        command = [sys.executable, "-P", *self._commands[kind], self._run_dir, str(index)]
        with stop_signals_blocked():
            self._processes[name] = subprocess.Popen(command, stdin=self._lifeline_read, pass_fds=pass_fds)
        return name

    @property
    def names(self) -> list[str]:
        """Every child ever started, in order."""
        return list(self._processes)

    def reap(self) -> dict[str, int]:
        """Exit codes of the children that ended since the last call; negative: the signal that killed it."""
        codes = {name: self._processes[name].poll() for name in self._processes.keys() - self._reaped}
        ended = {name: code for name, code in codes.items() if code is not None}
        self._reaped |= ended.keys()
        return ended

    def any_runs(self, names: Collection[str]) -> bool:
        """Tell whether one of these still runs."""
        return any(self._processes[name].poll() is None for name in names)

    def kill(self, names: Collection[str]) -> None:
        """End these at once and wait for it."""
        for name in names:
            self._processes[name].kill()
        for name in names:
            self._processes[name].wait()

    def close(self) -> None:
        """End all at once, and wait for it."""
        self.kill(self.names)
        os.close(self._lifeline_read)
        os.close(self._lifeline_write)


def describe_exit(code: int) -> str:
    """Say in words how a process ended that was not asked to."""
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL); the system kills so when it runs out of memory"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"
