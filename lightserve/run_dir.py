"""A server's run directory: its own, short enough for socket paths, removed by the next start if orphaned."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightserve.errors import ConfigError

# A socket path holds 107 bytes on Linux and 103 on macOS; the longest name is that of a model worker.
_MAX_RUN_DIR_BYTES = 103 - len("/model_worker-999")
_RANDOM_LEN = 8  # what mkdtemp appends


@contextmanager
def run_directory() -> Iterator[Path]:
    """Make a directory of mode 0700, and remove it at the end.

    The owner holds a lock on the directory for as long as it lives, so one without a lock has lost its owner: those of
    the same user are removed first.

    Raises:
        ConfigError: No directory for temporary files is writable and short enough for socket paths.
    """
    base = _base()
    _remove_orphans(base)
    path, lock = _make_locked(base)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _prefix() -> str:
    return f"lightserve-{os.getuid()}-"


def _base() -> Path:
    candidates = [Path(tempfile.gettempdir()).resolve(), Path("/tmp"), Path("/var/tmp")]
    for base in candidates:
        length = len(os.fsencode(base)) + 1 + len(_prefix()) + _RANDOM_LEN
        if length <= _MAX_RUN_DIR_BYTES and os.access(base, os.W_OK | os.X_OK):
            return base
    raise ConfigError(f"no usable directory for sockets: {candidates[0]} is too long for a socket path; set TMPDIR")


def _make_locked(base: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=base))
        try:
            return path, _lock(path, fcntl.LOCK_EX)
        except FileNotFoundError:
            continue  # another start took it for an orphan before we could lock it


def _remove_orphans(base: Path) -> None:
    for path in base.glob(_prefix() + "*"):
        try:
            lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives, it went away, or it is not ours
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _lock(path: Path, operation: int) -> int:
    """Lock a directory of our own and return its descriptor; an OSError if that is not possible."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, operation)
        # A waiter gets the lock of a directory that its holder has meanwhile removed: stat raises then.
        if os.stat(path).st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
    except OSError:
        os.close(lock)
        raise
    return lock
