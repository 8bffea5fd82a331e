"""The common start and end of every child process: named, logged, never outliving the launcher, never silent."""

import ctypes
import functools
import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import setproctitle
import zmq

from lightserve.boot import read_boot
from lightserve.errors import ConfigError
from lightserve.ipc.links import Outbox
from lightserve.ipc.messages import FatalMsg
from lightserve.log import configure_logging
from lightserve.stop_signals import ignore_stop_signals

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_LIFELINE_FD = 0  # standard input: a pipe whose other end only the launcher holds
_PR_SET_PDEATHSIG = 1
_SINGLE_PROCESSES = ("router", "detokenizer")


def process_name(kind: str, index: int) -> str:
    """Name of a process among its server's: ``router``, ``detokenizer``, ``http_server-0``, ``model_worker-3``."""
    return kind if kind in _SINGLE_PROCESSES else f"{kind}-{index}"


def run_child(kind: str, main: Callable[[str, int], None]) -> None:
    """Run ``main(run_dir, index)`` as a child of the launcher; both are the last arguments of the command line.

    An exception that escapes from ``main``, or from any thread, is told to the launcher and ends the process with
    status 1. Signals that ask to end are ignored: the launcher gets them too, and ends its children in order.

    Args:
        kind: ``http_server``, ``router``, ``detokenizer`` or ``model_worker``.
        main: The process; it ends when this returns.
    """
    run_dir, index = sys.argv[-2], int(sys.argv[-1])
    name = process_name(kind, index)
    ignore_stop_signals()
    _end_with_launcher()
    setproctitle.setproctitle(f"lightserve {name}")
    threading.excepthook = lambda failure: _die(run_dir, name, failure.exc_value)
    try:
        configure_logging(name, read_boot(run_dir).config.log_level)
        main(run_dir, index)
    except Exception as error:  # the process boundary: every kind of failure is told to the launcher
        _die(run_dir, name, error)


def fatal(function: Callable[P, T]) -> Callable[P, T]:
    """Let an error in ``function`` end the process as one that escapes from a thread does.

    For what a library calls that would hand the error to somebody else, and go on.
    """

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            threading.excepthook(
                threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
            )
            raise

    return guarded


def freeze_garbage_collector() -> None:
    """Take everything alive now out of later collections; call it once the process is ready."""
    gc.collect()
    gc.freeze()


def _end_with_launcher() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The pipe covers what the signal does not: a launcher that died before the line above, and other systems.
    threading.Thread(target=_await_end_of_launcher, name="lifeline", daemon=True).start()


def _await_end_of_launcher() -> None:
    os.read(_LIFELINE_FD, 1)
    os._exit(0)


def _die(run_dir: str, name: str, error: BaseException | None) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its own: any thread may be here
    outbox = Outbox(run_dir, "launcher", context)
    outbox.send(FatalMsg(name, _describe(error)))
    outbox.close()
    context.term()
    os._exit(1)


def _describe(error: BaseException | None) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    summary = "".join(traceback.format_exception_only(error))
    return (summary + "".join(traceback.format_exception(error))).rstrip()
