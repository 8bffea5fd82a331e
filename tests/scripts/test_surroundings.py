"""What stands beside every result, and how it is written."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_bench.measurements import PrefillTime
from script_tools.json_file import write_json
from script_tools.surroundings import commit_of, describe_surroundings


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_a_checkout_is_named_with_its_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert commit_of(tmp_path) is None
    git("init")
    assert commit_of(tmp_path) is None  # it has no commit yet
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "First")
    commit = git("rev-parse", "--short", "HEAD")
    (tmp_path / "results.json").touch()
    assert commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == f"{commit} with changes"
    (tmp_path / "copy").mkdir()
    assert commit_of(tmp_path / "copy") is None


def test_surroundings_are_known_without_git_and_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    surroundings = describe_surroundings(["a.py", "--b", "c d"])
    assert (surroundings["commit"], surroundings["gpu"]) == ("unknown", "none")
    assert surroundings["command"] == "a.py --b 'c d'"
    assert surroundings["versions"]["torch"] == torch.__version__
    assert surroundings["versions"]["cuda"] == (torch.version.cuda or "none")


def test_a_script_that_does_without_torch_does_not_load_it_to_name_its_version() -> None:
    code = "import sys; from script_tools import surroundings as it; print(it.describe_surroundings([])['versions'])"
    scripts = Path(write_json.__code__.co_filename).parent.parent
    command = [sys.executable, "-c", code]
    versions = subprocess.run(command, check=True, capture_output=True, text=True, cwd=scripts, env={}).stdout
    assert f"'torch': '{torch.__version__}'" in versions
    assert "cuda" not in versions


def test_results_of_all_kinds_are_written_for_people_and_programs(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"path": tmp_path, "inf": float("inf"), "time": PrefillTime(8, 1.5, (1.5,), 2.0)})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text)["path"] == str(tmp_path)
    assert json.loads(text)["inf"] is None
    assert json.loads(text)["time"]["repeats_ms"] == [1.5]
    assert text.count("\n") > 5
    with pytest.raises(TypeError, match="ndarray"):
        write_json(tmp_path / "b.json", np.zeros(1))
