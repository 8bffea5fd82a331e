"""``scripts/serve`` and ``scripts/test`` before lightserve is there: which Python, what is installed, what is said."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A Python that answers the questions the scripts ask, and whose environments hold stubs that record their arguments.
PYTHON_STUB = """#!/bin/bash
case "$*" in
  *version_info*) exit {supported} ;;
  *python_version*) echo {version} ;;
  *ensurepip*) exit {venv} ;;
  "-m venv"*)
    bin="${{@: -1}}/bin"; mkdir -p "$bin"
    printf '#!/bin/bash\\ncase "$*" in *install*) echo "$*" >>{log}; exit {pip} ;; esac\\n' >"$bin/python"
    printf '#!/bin/bash\\necho "lightserve $* PYTHONSAFEPATH=$PYTHONSAFEPATH"\\n' >"$bin/lightserve"
    chmod +x "$bin"/*; echo venv "{name}" >>{log} ;;
esac
"""


class Clone:
    """A fresh clone on a machine with a few commands and whatever Pythons a test adds."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone with a space"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.bin.mkdir()
        shutil.copytree(ROOT / "scripts", self.root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        for command in ("bash", "cat", "chmod", "cksum", "dirname", "env", "flock", "mkdir"):
            (self.bin / command).symlink_to(str(shutil.which(command)))

    def add_python(self, name: str, *, version: str = "3.12.1", venv: bool = True, pip: bool = True) -> Path:
        supported = version.rpartition(".")[0] in ("3.11", "3.12", "3.13")
        stub = PYTHON_STUB.format(
            supported=int(not supported), version=version, venv=int(not venv), pip=int(not pip), log=self.log, name=name
        )
        path = self.bin / name
        path.write_text(stub)
        path.chmod(0o755)
        return path

    def serve(self, *flags: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return self.run("serve", *flags, **environment)

    def run(self, script: str, *flags: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        command = [str(self.root / "scripts" / script), *flags]
        return subprocess.run(command, env={"PATH": str(self.bin), **environment}, capture_output=True, text=True)

    @property
    def events(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_the_first_start_makes_an_environment_and_passes_the_flags_through(clone: Clone) -> None:
    clone.add_python("python3")

    run = clone.serve("--model_dir", "/models/a b", "--tp", "1")

    assert run.returncode == 0
    assert run.stdout == "lightserve serve --model_dir /models/a b --tp 1 PYTHONSAFEPATH=1\n"
    made, installed = clone.events
    assert made == "venv python3"
    assert installed.endswith(f"--constraint {clone.root}/constraints.txt --editable {clone.root}")


def test_the_second_start_installs_nothing(clone: Clone) -> None:
    clone.add_python("python3")
    clone.serve()
    events = clone.events

    assert clone.serve("--port", "1").stdout == "lightserve serve --port 1 PYTHONSAFEPATH=1\n"
    assert clone.events == events


def test_the_environment_of_the_tests_serves_too_but_not_the_other_way_round(clone: Clone) -> None:
    clone.add_python("python3")

    for script in ("serve", "test", "serve", "test"):
        clone.run(script)

    made, for_serve, for_test = clone.events
    assert made == "venv python3"
    assert for_serve.endswith(str(clone.root))
    assert for_test.endswith(f"{clone.root}[test]")


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_change_of_what_is_asked_for_installs_again_into_the_same_environment(clone: Clone, name: str) -> None:
    clone.add_python("python3")
    clone.serve()
    with (clone.root / name).open("a") as file:
        file.write("\n# changed\n")

    clone.serve()

    assert [event.split()[0] for event in clone.events] == ["venv", "-m", "-m"]


def test_a_failed_installation_says_so_and_is_tried_again(clone: Clone) -> None:
    clone.add_python("python3", pip=False)

    runs = [clone.serve() for _ in range(2)]

    for run in runs:
        assert run.returncode == 1
        assert "installation failed" in run.stderr
        assert "needs a network" in run.stderr
    assert [event.split()[0] for event in clone.events] == ["venv", "-m", "-m"]


def test_no_python_at_all_is_said(clone: Clone) -> None:
    run = clone.serve()

    assert run.returncode == 1
    assert "needs Python 3.11, 3.12 or 3.13" in run.stderr


@pytest.mark.parametrize("version", ["3.10.14", "3.14.0"])
def test_an_unsupported_python_is_named(clone: Clone, version: str) -> None:
    clone.add_python("python3", version=version)

    run = clone.serve()

    assert run.returncode == 1
    assert f"needs Python 3.11, 3.12 or 3.13 (python3 is {version})" in run.stderr


def test_a_python_without_venv_is_named_with_the_remedy(clone: Clone) -> None:
    clone.add_python("python3.12", venv=False)

    run = clone.serve()

    assert run.returncode == 1
    assert "python3.12 has no venv module" in run.stderr
    assert "apt install python3.12-venv" in run.stderr


def test_the_first_python_that_will_do_is_taken(clone: Clone) -> None:
    clone.add_python("python3.12", venv=False)
    clone.add_python("python3.13", version="3.13.0")
    clone.add_python("python3", version="3.14.0")

    assert clone.serve().returncode == 0
    assert clone.events[0] == "venv python3.13"


def test_the_operator_can_choose_the_python(clone: Clone) -> None:
    clone.add_python("python3.12")
    mine = clone.add_python("mine", version="3.11.9")

    assert clone.serve(PYTHON=str(mine)).returncode == 0
    assert clone.events[0] == "venv mine"


def test_every_check_that_fails_is_named(clone: Clone) -> None:
    clone.add_python("python3")

    run = clone.run("test")  # where no tool is installed

    assert run.returncode == 1
    failed = [line.removeprefix("failed: ").split()[0] for line in run.stderr.splitlines() if line.startswith("failed")]
    assert failed == ["ruff", "ruff", "mypy", "lint-imports", "pytest"]


def test_the_scripts_can_be_run() -> None:
    for name in ("scripts/serve", "scripts/test", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK)
