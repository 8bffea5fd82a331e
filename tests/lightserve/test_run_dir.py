import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightserve.errors import ConfigError
from lightserve.ipc.links import Inbox
from lightserve.ipc.messages import RouterInbox
from lightserve.run_dir import run_directory


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setattr(tempfile, "tempdir", base)
        yield Path(base)


def make_orphan() -> Path:
    """The run directory of a process that was killed."""
    program = (
        "import os, signal, sys, tempfile; from lightserve.run_dir import run_directory\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "with run_directory() as path: print(path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-P", "-c", program, str(tempfile.tempdir)]
    return Path(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip())


def test_it_is_private_and_gone_at_the_end(base: Path) -> None:
    with run_directory() as path:
        assert path.parent == base
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "something").touch()

    assert list(base.iterdir()) == []


def test_two_live_ones_do_not_disturb_each_other(base: Path) -> None:
    with run_directory() as first:
        with run_directory() as second:
            assert first != second
            assert first.exists()
        assert first.exists()


def test_the_directories_of_killed_owners_are_removed_and_those_of_live_ones_are_not(base: Path) -> None:
    with run_directory() as alive:
        orphans = [make_orphan() for _ in range(2)]
        assert not orphans[0].exists()  # the second start has removed it
        assert orphans[1].exists()

        with run_directory() as new:
            assert sorted(base.iterdir()) == sorted([alive, new])


def test_other_directories_are_left_alone(base: Path) -> None:
    (base / "lightserve-notes").mkdir()
    (base / f"lightserve-{os.getuid()}-file").touch()
    (base / f"lightserve-{os.getuid()}-link").symlink_to(base / "lightserve-notes")

    with run_directory():
        assert (base / "lightserve-notes").exists()
        assert (base / f"lightserve-{os.getuid()}-file").exists()
        assert (base / f"lightserve-{os.getuid()}-link").exists()


def test_a_directory_taken_for_an_orphan_before_it_was_locked_is_made_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    removed: list[Path] = []

    def remove_while_we_wait(fd: int, operation: int) -> None:
        if not removed:
            removed.append(next(base.iterdir()))
            removed[0].rmdir()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", remove_while_we_wait)

    with run_directory() as path:
        assert path.exists()
        assert path != removed[0]


@pytest.mark.parametrize("name", ["d" * 150, "with a space"])
def test_any_temporary_directory_allows_sockets(base: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (base / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(base / name))

    with run_directory() as path:
        inbox: Inbox[RouterInbox] = Inbox(str(path), "model_worker-999", RouterInbox)
        assert (path / "model_worker-999").is_socket()
        inbox.close()


def test_no_usable_directory_is_the_operators_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)

    with pytest.raises(ConfigError, match="TMPDIR"), run_directory():
        pass
