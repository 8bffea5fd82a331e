import pytest

from lightserve import device
from lightserve.device import resolve_device
from lightserve.errors import ConfigError


def set_machine(monkeypatch: pytest.MonkeyPatch, num_gpus: int, *, cuda_torch: bool) -> None:
    monkeypatch.setattr(device, "_count_gpus", lambda: num_gpus)
    monkeypatch.setattr(device, "_torch_is_built_for_cuda", lambda: cuda_torch)


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 2, cuda_torch=True)

    assert resolve_device("auto", tp=2) == "cuda"


@pytest.mark.parametrize(("num_gpus", "cuda_torch"), [(0, True), (1, False), (0, False)])
def test_auto_takes_the_cpu_otherwise(monkeypatch: pytest.MonkeyPatch, num_gpus: int, cuda_torch: bool) -> None:
    set_machine(monkeypatch, num_gpus, cuda_torch=cuda_torch)

    assert resolve_device("auto", tp=1) == "cpu"


@pytest.mark.parametrize(
    ("num_gpus", "cuda_torch", "why"), [(0, True, "driver shows none"), (1, False, "torch is a CPU build")]
)
def test_cuda_without_a_usable_gpu_says_why(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, cuda_torch: bool, why: str
) -> None:
    set_machine(monkeypatch, num_gpus, cuda_torch=cuda_torch)

    with pytest.raises(ConfigError, match=f"--device cuda: .*{why}"):
        resolve_device("cuda", tp=1)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 2, cuda_torch=True)

    with pytest.raises(ConfigError, match="--tp 4 needs 4 GPUs; there are 2"):
        resolve_device("auto", tp=4)


def test_cpu_never_looks_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_count_gpus", lambda: pytest.fail("looked"))

    assert resolve_device("cpu", tp=8) == "cpu"
