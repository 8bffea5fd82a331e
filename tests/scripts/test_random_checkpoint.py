"""Random checkpoints, read back by the loader; the script that times that."""

import json
from pathlib import Path

import bench_loading
import pytest
import torch
from script_tools.random_checkpoint import count_bytes, random_bits, write_checkpoint

from lightserve.model_config import load_model_config
from lightserve.model_worker.weights.loader import load_weights
from lightserve.model_worker.weights.sharding import Shard

VALUES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
MAX_FILE_BYTES = 30_000


def test_what_was_written_is_loaded_from_all_files(tmp_path: Path) -> None:
    made: dict[str, torch.Tensor] = {}
    random = random_bits(131 * 64)

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        made[name] = random(name, shape)
        return made[name]

    total = write_checkpoint(tmp_path, VALUES, make, dtype=torch.bfloat16, max_file_bytes=MAX_FILE_BYTES)
    files = list(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(files) > 2
    assert total == count_bytes(VALUES, torch.bfloat16)
    assert total == sum(tensor.nbytes for tensor in made.values()) <= sum(file.stat().st_size for file in files)
    config = load_model_config(tmp_path)
    weights = load_weights(
        config, Shard.of(config, 0, 1), device=torch.device("cpu"), dtype=torch.bfloat16, load_format="auto"
    )
    assert torch.equal(weights.lm_head, made["lm_head.weight"])
    assert torch.equal(weights.layers[1].down_proj, made["model.layers.1.mlp.down_proj.weight"])
    assert not torch.equal(weights.layers[0].down_proj, weights.layers[1].down_proj)


def test_random_bits_are_numbers_of_either_sign_and_one_size() -> None:
    numbers = random_bits(10_000)("w", (100, 100)).float()
    assert numbers.abs().min() >= 2**-7
    assert numbers.abs().max() < 2**-6
    assert 4000 < int((numbers > 0).sum()) < 6000


def bench(model: Path, folder: Path, json_path: Path, tp: str = "1") -> list[dict[str, float]]:
    arguments = ["--model_dir", str(model), "--folder", str(folder), "--device", "cpu", "--tp", tp]
    assert bench_loading.main([*arguments, "--repeats", "1", "--json", str(json_path)]) == 0
    loads: list[dict[str, float]] = json.loads(json_path.read_text())["loads"]
    return loads


def test_loading_is_timed_for_each_rank_and_the_checkpoint_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    loads = bench(tmp_path, tmp_path / "new", tmp_path / "out.json", tp="1,2")
    assert capsys.readouterr().out.startswith(f"writing 0.00 GB to {tmp_path / 'new'}\nwrote 0.00 GB in ")
    assert [(load["tp"], load["rank"]) for load in loads] == [(1, 0), (2, 0), (2, 1)]
    assert all(load["gb_per_s"] == pytest.approx(load["gb"] / load["seconds"]) for load in loads)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_was_there_before_is_left_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, VALUES, random_bits(131 * 64), dtype=torch.bfloat16, max_file_bytes=MAX_FILE_BYTES)
    before = sorted(file.name for file in tmp_path.iterdir())
    bench(tmp_path, tmp_path, tmp_path.parent / "out.json")
    assert sorted(file.name for file in tmp_path.iterdir()) == before


def test_a_device_that_cannot_be_opened_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    monkeypatch.setattr(bench_loading, "write_checkpoint", lambda *_, **__: pytest.fail("written"))
    arguments = ["--model_dir", str(tmp_path), "--folder", str(tmp_path / "new"), "--device", "no_such_device"]
    assert bench_loading.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("bench_loading.py: --device no_such_device: ")
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_that_could_not_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_the_disk(folder: Path, *_: object, **__: object) -> int:
        (folder / "half.safetensors").touch()
        raise OSError(28, "No space left on device")

    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    monkeypatch.setattr(bench_loading, "write_checkpoint", fill_the_disk)
    arguments = ["--model_dir", str(tmp_path), "--folder", str(tmp_path / "new"), "--device", "cpu"]
    assert bench_loading.main(arguments) == 2
    assert capsys.readouterr().err == "bench_loading.py: [Errno 28] No space left on device\n"
    assert not (tmp_path / "new").exists()
