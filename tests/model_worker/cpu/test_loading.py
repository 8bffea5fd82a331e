"""What is decided when a CPU engine is loaded: number format, threads, memory."""

from pathlib import Path

import msgspec
import pytest
import torch

from lightserve.boot import Boot
from lightserve.config import ServerConfig
from lightserve.errors import ConfigError
from lightserve.model_config import load_model_config
from lightserve.model_worker import host
from lightserve.model_worker.cpu import dtype as cpu_dtype
from lightserve.model_worker.cpu import loading as cpu_loading
from lightserve.model_worker.cpu.dtype import resolve_cpu_dtype
from lightserve.model_worker.cpu.loading import load_cpu_engine
from lightserve.model_worker.cpu.memory import reserved_bytes
from lightserve.model_worker.host import free_host_bytes, num_usable_cpus
from lightserve.model_worker.kv_cache import GIB
from lightserve.model_worker.loading import sampled_vocab_size
from lightserve.tokenizer import Tokenizer
from tests.model_worker.references import make_reference

SLOT_BYTES = 2 * 2 * 2 * 16 * 4  # layers, K and V, kv heads, head_dim, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_reference("llama", folder)
    return folder


@pytest.fixture
def boot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Boot:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(cpu_loading, "sampled_vocab_size", lambda _: 131)
    monkeypatch.setattr(cpu_loading, "free_host_bytes", lambda: GIB)
    return Boot(
        config=ServerConfig(model_dir=str(folder), dtype="float32", running_max_req_size=100),
        model=load_model_config(folder),
        run_dir=str(folder),
        tokenizer_dir=str(folder),
        served_model_name="tiny",
        listen_fd=-1,
        device="cpu",
        max_req_total_len=256,
        chunked_prefill_size=64,
        batch_max_tokens=164,
    )


@pytest.mark.parametrize(("more_in_model", "sampled"), [(7, 0), (0, 0), (-1, -1)])
def test_sampled_are_ids_that_have_a_logit_and_a_text(
    boot: Boot, model_dir: Path, more_in_model: int, sampled: int
) -> None:
    num_texts = Tokenizer.load(model_dir).vocab_size
    model = msgspec.structs.replace(boot.model, vocab_size=num_texts + more_in_model)
    padded = msgspec.structs.replace(boot, model=model, tokenizer_dir=str(model_dir))
    assert sampled_vocab_size(padded) == num_texts + sampled


def with_slots(boot: Boot, num_slots: int | None, num_rows: int = 100) -> Boot:
    config = ServerConfig(
        model_dir=boot.config.model_dir,
        dtype="float32",
        running_max_req_size=num_rows,
        max_total_token_num=num_slots,
    )
    return msgspec.structs.replace(boot, config=config)


def room(boot: Boot) -> int:
    """Bytes left beside the largest step and the rows."""
    return GIB - reserved_bytes(
        boot.model,
        num_rows=boot.config.running_max_req_size,
        max_req_total_len=boot.max_req_total_len,
        batch_max_tokens=boot.batch_max_tokens,
    )


def test_the_pool_takes_half_of_what_is_left_beside_the_largest_step(boot: Boot) -> None:
    crowded = with_slots(boot, None, num_rows=10_000)
    assert load_cpu_engine(crowded, 0).pool.num_slots == room(crowded) // 2 // SLOT_BYTES - 1


def test_the_pool_is_never_larger_than_all_requests_together(boot: Boot) -> None:
    assert load_cpu_engine(boot, 0).pool.num_slots == 100 * 256


def test_a_pool_asked_for_is_given_when_it_fits_and_else_refused_with_the_number_that_does(boot: Boot) -> None:
    max_slots = int(room(boot) * 0.9) // SLOT_BYTES - 1
    assert load_cpu_engine(with_slots(boot, max_slots), 0).pool.num_slots == max_slots
    with pytest.raises(ConfigError, match=f"--max_total_token_num {max_slots + 1} does not fit: at most {max_slots} "):
        load_cpu_engine(with_slots(boot, max_slots + 1), 0)


@pytest.mark.parametrize(
    ("asked", "checkpoint", "native", "expected"),
    [
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "bfloat16", False, torch.float32),
        ("auto", "float16", True, torch.float32),
        ("auto", "float32", True, torch.float32),
        ("bfloat16", "float32", False, torch.bfloat16),
        ("float16", "bfloat16", True, torch.float16),
    ],
)
def test_the_number_format_follows_checkpoint_and_cpu(
    asked: str, checkpoint: str, native: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_dtype, "has_native_bfloat16", lambda: native)
    assert resolve_cpu_dtype(asked, checkpoint) is expected  # type: ignore[arg-type]


def test_threads_are_shared_among_ranks_and_the_environment_overrules(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for num_cpus, num_ranks in ((8, 1), (8, 3), (8, 16), (2, 1), (2, 2)):
        monkeypatch.setattr(cpu_loading, "num_usable_cpus", lambda num_cpus=num_cpus: num_cpus)
        cpu_loading.set_num_threads(num_ranks)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    cpu_loading.set_num_threads(1)
    assert asked == [7, 2, 1, 2, 1]


def make_machine(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    monkeypatch.setattr(host, "_MEMINFO", folder / "meminfo")
    monkeypatch.setattr(host, "_CGROUP", folder)


def test_free_memory_is_the_machines_when_the_container_sets_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_machine(tmp_path, monkeypatch, meminfo="MemTotal: 9 kB\nMemAvailable:  4096 kB\n", memory_max="max\n")
    assert free_host_bytes() == 4 << 20


def test_free_memory_is_the_containers_when_that_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_machine(
        tmp_path, monkeypatch, meminfo="MemAvailable: 4096 kB\n", memory_max="3000000\n", memory_current="1000000\n"
    )
    assert free_host_bytes() == 2_000_000


def test_a_container_may_not_use_more_cpus_than_its_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_machine(tmp_path, monkeypatch, meminfo="MemAvailable: 1 kB\n", cpu_max="100000 100000\n")
    assert num_usable_cpus() == 1
