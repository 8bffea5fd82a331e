"""What a wheel and a source distribution hold."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, without what git ignores: building writes beside the sources."""
    copy = tmp_path_factory.mktemp("build") / "lightserve"
    ignored = ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    copytree(ROOT, copy, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def distributions(sources: Path) -> Path:
    """Folder with the wheel, built from the source distribution, which lies there too."""
    folder = sources.with_name("dist")
    command = [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", str(folder), str(sources)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def modules(sources: Path) -> Counter[str]:
    """Every module of ours once, by its path under the name that it is imported by."""
    folders = ["router", "detokenizer", "model_worker", "kernels"]
    inside = [path.relative_to(sources) for path in sources.glob("lightserve/**/*.py")]
    linked = [Path("lightserve") / path.relative_to(sources) for f in folders for path in sources.glob(f"{f}/**/*.py")]
    return Counter(str(path) for path in {*inside, *linked})


def test_the_wheel_holds_every_module_once_and_installs_only_lightserve(sources: Path, distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()

    assert Counter(name for name in names if name.endswith(".py")) == modules(sources)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"lightserve"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_source_distribution_holds_every_source_once(sources: Path, distributions: Path) -> None:
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = Counter(name.partition("/")[2] for name in tar.getnames())

    assert max(names.values()) == 1
    assert modules(sources).keys() <= names.keys()
    assert not any(name.startswith(("router", "detokenizer", "model_worker", "kernels")) for name in names)
    assert {
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "constraints.txt",
        "scripts/serve",
        "tests/fakes.py",
    } <= names.keys()


def test_every_direct_dependency_is_pinned_to_a_version_that_the_package_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        pin.name: pin.specifier
        for line in lines
        if (text := line.partition("#")[0].strip())
        for pin in [Requirement(text)]
    }

    for requirement in map(Requirement, asked):
        (pin,) = pins.pop(requirement.name)
        assert pin.operator == "=="
        assert pin.version in requirement.specifier
    assert pins == {}


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0", "2.13.0+cpu"])
def test_the_supported_versions_of_torch_are_allowed(version: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [line for line in project["dependencies"] if line.startswith("torch")]

    assert version in Requirement(torch).specifier
