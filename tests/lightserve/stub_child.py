"""A child process that only follows the launcher's protocol: ready, drain, down. For tests of the launcher alone.

Usage: ``stub_child.py KIND RUN_DIR INDEX``. The environment variable ``LIGHTSERVE_STUBS`` holds a JSON object that says
how each kind misbehaves: see ``_MISBEHAVIOURS``.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

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


_MISBEHAVIOURS: dict[str, Callable[[], None]] = {
    "config_error": _raise_config_error,
    "raise": _raise,
    "raise_in_thread": _raise_in_thread,
    "sleep": lambda: time.sleep(1000),
    "exit": lambda: sys.exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def main(run_dir: str, index: int) -> None:
    """Be ready, then follow."""
    name = process_name(KIND, index)
    misbehaviour = json.loads(os.environ.get(VARIABLE, "{}")).get(KIND)
    if misbehaviour is not None:
        _MISBEHAVIOURS[misbehaviour]()
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
                if os.environ.get("LIGHTSERVE_STUB_DRAINS") != "never":
                    return
            case DownMsg() as message:
                print(name, message, flush=True)
                return
            case TextMsg() | LoadMsg() | None:
                pass


if __name__ == "__main__":
    run_child(KIND, main)
