"""Signals as events: SIGINT and SIGTERM count as requests to stop, SIGCHLD as a reason to look at the children."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalInbox:
    """Turns signals into bytes on a descriptor, for a poller. Make it in the main thread."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(signum, lambda *_: None)

    def count_stops(self) -> int:
        """Stop signals that came since the last call."""
        try:
            received = os.read(self.fd, 4096)
        except BlockingIOError:
            return 0
        return sum(signum in STOP_SIGNALS for signum in received)


def exit_on_stop_signals() -> None:
    """Let a stop signal end this process with status 0, through its ``finally`` blocks."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, _exit)


def ignore_stop_signals() -> None:
    """Ignore stop signals, and forget those held back since before the start of this process."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Hold stop signals back. A child started meanwhile holds them back until it decides what to do about them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _exit(signum: int, frame: object) -> None:
    raise SystemExit(0)
