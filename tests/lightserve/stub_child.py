"""A child process that only follows the launcher's protocol: ready, drain, down. For tests of the launcher alone.

Usage: ``stub_child.py KIND RUN_DIR INDEX``. The environment variable ``LIGHTSERVE_STUBS`` holds a JSON object that says
how each kind, or one process of it, misbehaves: see ``_misbehave``.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lightserve.boot import read_boot
from lightserve.child import process_name, run_child
from lightserve.errors import ConfigError
from lightserve.ipc.links import Inbox, Outbox
from lightserve.ipc.messages import DownMsg, DrainMsg, HttpInbox, LoadMsg, ReadyMsg, ServeMsg, ServingMsg, TextMsg

VARIABLE = "LIGHTSERVE_STUBS"
KIND = sys.argv[1]
STUB_POOL = 1000


def _raise_config_error() -> None:
    raise ConfigError("--dtype float16 does not suit this machine")


def _raise_in_thread() -> None:
    thread = threading.Thread(target=_raise)
    thread.start()
    thread.join()


def _raise() -> None:
    raise RuntimeError("the stub's own fault")


def _raise_when_told() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: _raise())


def _raise_after(name: str) -> None:
    pid_file = Path(sys.argv[-2], f"pid-of-{name}")
    while not pid_file.exists():
        time.sleep(0.01)
    while _runs(int(pid_file.read_text())):
        time.sleep(0.01)
    raise RuntimeError(f"{name} has gone")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


_MISBEHAVIOURS: dict[str, Callable[[], None]] = {
    "config_error": _raise_config_error,
    "raise": _raise,
    "raise_when_told": _raise_when_told,
    "raise_in_thread": _raise_in_thread,
    "sleep": lambda: time.sleep(1000),
    "exit": lambda: sys.exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def _misbehave(how: str) -> None:
    """Do one of ``_MISBEHAVIOURS``, or "raise_after NAME": once that process has gone."""
    verb, _, name = how.partition(" ")
    if verb == "raise_after":
        threading.Thread(target=_raise_after, args=(name,)).start()
    else:
        _MISBEHAVIOURS[verb]()


def _ends_at(message: DrainMsg) -> bool:
    """Tell whether to end, as ``LIGHTSERVE_STUB_DRAINS`` says: always if unset, "never", or "at_once" when told so."""
    match os.environ.get("LIGHTSERVE_STUB_DRAINS"):
        case "never":
            return False
        case "at_once":
            return message.limit_s == 0
        case _:
            return True


def _leave_pid(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_text(str(os.getpid()))
    new.rename(path)


def main(run_dir: str, index: int) -> None:
    """Be ready, then follow."""
    name = process_name(KIND, index)
    _leave_pid(Path(run_dir, f"pid-of-{name}"))
    misbehaviours = json.loads(os.environ.get(VARIABLE, "{}"))
    misbehaviour = misbehaviours.get(name, misbehaviours.get(KIND))
    if misbehaviour is not None:
        _misbehave(misbehaviour)
    inbox: Inbox[HttpInbox] = Inbox(run_dir, name, HttpInbox)
    pool = read_boot(run_dir).config.max_total_token_num or STUB_POOL
    launcher = Outbox(run_dir, "launcher")
    launcher.send(ReadyMsg(name, pool, "a stub's pool") if KIND == "router" else ReadyMsg(name))
    while True:
        match inbox.receive():
            case ServeMsg() as message:
                print(name, message, flush=True)
                launcher.send(ServingMsg(name))
            case DrainMsg() as message:
                print(name, message, flush=True)
                if _ends_at(message):
                    return
            case DownMsg() as message:
                print(name, message, flush=True)
                return
            case TextMsg() | LoadMsg() | None:
                pass


if __name__ == "__main__":
    run_child(KIND, main)
