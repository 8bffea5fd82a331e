from dataclasses import replace
from pathlib import Path

import pytest

from lightserve import preparation
from lightserve.boot import Boot, read_boot, write_boot
from lightserve.config import ServerConfig
from lightserve.errors import ConfigError
from lightserve.ipc.messages import ReadyMsg
from lightserve.preparation import prepare
from lightserve.ready_text import ready_text
from tests.tiny_model import CONTEXT_LEN, make_model_folder


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    folder = make_model_folder(tmp_path / "tiny-model")
    return ServerConfig(model_dir=str(folder), load_format="dummy", device="cpu")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def preset() -> Path:
    """A folder with a config.json alone."""
    presets = Path(__file__).parents[2] / "scripts" / "presets"
    return next(path.parent for path in sorted(presets.glob("*/config.json")))


def test_every_default_is_resolved(config: ServerConfig, run_dir: Path) -> None:
    boot = prepare(config, run_dir, listen_fd=7)

    assert boot.device == "cpu"
    assert boot.served_model_name == "tiny-model"
    assert boot.tokenizer_dir == config.model_dir
    assert boot.max_req_total_len == CONTEXT_LEN
    assert boot.chunked_prefill_size == 512
    assert boot.batch_max_tokens == 512 + config.running_max_req_size
    assert (boot.run_dir, boot.listen_fd) == (str(run_dir), 7)


def test_a_gpu_prefills_larger_chunks(config: ServerConfig, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "resolve_device", lambda device, tp: "cuda")

    assert prepare(config, run_dir, listen_fd=7).chunked_prefill_size == 8192


def test_what_the_operator_sets_stays(config: ServerConfig, run_dir: Path) -> None:
    asked = replace(
        config,
        served_model_name="mine",
        max_req_total_len=100,
        chunked_prefill_size=64,
        running_max_req_size=8,
        batch_max_tokens=80,
    )

    boot = prepare(asked, run_dir, listen_fd=7)

    assert boot.served_model_name == "mine"
    assert (boot.max_req_total_len, boot.chunked_prefill_size, boot.batch_max_tokens) == (100, 64, 80)


def test_what_children_read_is_what_the_launcher_wrote(config: ServerConfig, run_dir: Path) -> None:
    boot = prepare(config, run_dir, listen_fd=7)

    write_boot(boot)

    assert read_boot(str(run_dir)) == boot


def test_a_tokenizer_of_its_own_may_be_a_folder_or_a_file(config: ServerConfig, run_dir: Path, tmp_path: Path) -> None:
    other = make_model_folder(tmp_path / "other")

    for given in (other, other / "tokenizer.json"):
        boot = prepare(replace(config, tokenizer=str(given)), run_dir, listen_fd=7)
        assert boot.tokenizer_dir == str(other)


def test_a_model_that_is_a_configuration_only_gets_an_invented_tokenizer(
    config: ServerConfig, run_dir: Path, preset: Path
) -> None:
    boot = prepare(replace(config, model_dir=str(preset)), run_dir, listen_fd=7)

    assert boot.tokenizer_dir == str(run_dir / "tokenizer")
    assert (run_dir / "tokenizer" / "tokenizer.json").exists()


def test_a_tokenizer_that_is_named_is_never_invented(config: ServerConfig, run_dir: Path, preset: Path) -> None:
    for given in (preset, preset / "config.json"):
        with pytest.raises(ConfigError, match=f"^--tokenizer {given}: {preset} has no tokenizer.json$"):
            prepare(replace(config, tokenizer=str(given)), run_dir, listen_fd=7)


def test_a_tokenizer_of_its_own_serves_a_model_folder_without_one(
    config: ServerConfig, run_dir: Path, preset: Path
) -> None:
    boot = make_boot(config, run_dir, model_dir=str(preset), load_format="auto", tokenizer=config.model_dir)

    assert boot.tokenizer_dir == config.model_dir


def test_a_longer_context_than_the_models_is_refused(config: ServerConfig, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=f"--max_req_total_len {CONTEXT_LEN + 1} exceeds .* {CONTEXT_LEN} tokens"):
        prepare(replace(config, max_req_total_len=CONTEXT_LEN + 1), run_dir, listen_fd=7)


def make_boot(config: ServerConfig, run_dir: Path, **changes: object) -> Boot:
    return prepare(replace(config, **changes), run_dir, listen_fd=7)  # type: ignore[arg-type]


def test_the_ready_line_names_the_model_the_address_and_the_pool_with_its_reason(
    config: ServerConfig, run_dir: Path
) -> None:
    text = ready_text(make_boot(config, run_dir), "http://127.0.0.1:8000", ReadyMsg("router", 9000, "1 GiB / 2 KiB"))

    assert text.splitlines()[0] == (
        "lightserve is ready: tiny-model on http://127.0.0.1:8000, max_total_token_num 9000 (1 GiB / 2 KiB)"
    )


def test_the_api_key_is_asked_for_and_not_shown(config: ServerConfig, run_dir: Path) -> None:
    boot = make_boot(config, run_dir, api_key="sesame")

    text = ready_text(boot, "http://127.0.0.1:8000", ReadyMsg("router", 9000))

    assert "-H 'Authorization: Bearer YOUR_API_KEY'" in text
    assert "sesame" not in text
