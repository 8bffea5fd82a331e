"""The worker's remote interface: results one step late, over a real connection."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec.msgpack import encode
from msgspec.structs import replace

from lightserve.ipc.messages import StepPlan, StepResult, pack_float32, pack_int32
from lightserve.ipc.worker_link import WorkerListener
from lightserve.model_worker.kv_cache import PoolSize
from lightserve.model_worker.process import DirectLauncher, ThreadLauncher, WorkerService
from lightserve.router.worker_client import WorkerClient


@dataclass
class Output:
    step_id: int
    has_ended: ClassVar[bool] = True

    def result(self) -> StepResult:
        return StepResult(self.step_id, pack_int32([self.step_id * 10]), pack_float32([-1.0]))


@dataclass
class GatedEngine:
    """Steps that wait for the gate, and note that they have run."""

    num_steps: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    steps_run: list[int] = field(default_factory=list)

    def step(self, plan: StepPlan) -> Output:
        self.gate.wait(20)
        self.steps_run.append(plan.step_id)
        return Output(plan.step_id)


def make_plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, b"", [], b"", b"", b"", b"", b"")


@pytest.fixture
def engine() -> GatedEngine:
    return GatedEngine()


@pytest.fixture
def client(engine: GatedEngine, tmp_path: Path) -> Iterator[WorkerClient]:
    service = WorkerService(engine, PoolSize(123, "because"), ThreadLauncher())  # type: ignore[arg-type]
    listener = WorkerListener(str(tmp_path / "model_worker-0"))
    thread = threading.Thread(target=listener.serve, args=(service,))
    thread.start()
    client = WorkerClient(str(tmp_path), 1)
    yield client
    engine.gate.set()
    client.close()
    thread.join()


class FailingEngine(GatedEngine):
    def step(self, plan: StepPlan) -> Output:
        raise RuntimeError("no such slot")


class FailingOutput(Output):
    def result(self) -> StepResult:
        raise RuntimeError("an illegal memory access")


class LaterFailingEngine(GatedEngine):
    def step(self, plan: StepPlan) -> Output:
        return FailingOutput(plan.step_id)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Errors that would have ended the process."""
    ends: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: ends.append(str(failure.exc_value)))
    return ends


def test_an_error_in_a_step_ends_the_process(ends: list[str]) -> None:
    service = WorkerService(FailingEngine(), PoolSize(123, "because"), DirectLauncher())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        service.exposed_step(encode(make_plan(1)))
    assert ends == ["no such slot"]


@pytest.mark.parametrize("is_last", [False, True])
def test_an_error_that_shows_when_a_step_has_run_ends_the_process(ends: list[str], is_last: bool) -> None:
    service = WorkerService(LaterFailingEngine(), PoolSize(123, "because"), DirectLauncher())  # type: ignore[arg-type]
    service.exposed_step(encode(make_plan(1)))
    with pytest.raises(RuntimeError):
        _ = service.exposed_flush() if is_last else service.exposed_step(encode(make_plan(2)))
    assert ends == ["an illegal memory access"]


def test_load_tells_the_size_of_the_pool(client: WorkerClient) -> None:
    reply = client.load()
    assert (reply.max_total_token_num, reply.note) == (123, "because")


def test_a_step_gives_the_result_of_the_one_before_and_flush_the_last(
    client: WorkerClient, engine: GatedEngine
) -> None:
    engine.gate.set()
    assert client.flush() is None
    assert client.step(make_plan(1)) is None
    for step_id in (1, 2):
        result = client.step(make_plan(step_id + 1))
        assert result is not None
        assert replace(result, device_waited=False) == Output(step_id).result()
    assert client.flush() == Output(3).result()
    assert client.flush() is None


def test_a_result_says_whether_the_device_waited_for_the_next_step(client: WorkerClient, engine: GatedEngine) -> None:
    client.step(make_plan(1))
    opener = threading.Timer(0.2, engine.gate.set)
    opener.start()
    running = client.step(make_plan(2))  # comes while the first waits for the gate
    opener.join()
    while engine.steps_run != [1, 2]:
        time.sleep(0.01)
    time.sleep(0.2)  # for the second's output to be handed over
    ended = client.step(make_plan(3))
    assert running is not None
    assert ended is not None
    assert (running.device_waited, ended.device_waited) == (False, True)


def test_the_first_call_does_not_wait_for_its_step(client: WorkerClient, engine: GatedEngine) -> None:
    assert client.step(make_plan(1)) is None
    assert engine.steps_run == []


def test_an_error_in_a_step_escapes_from_the_compute_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    escaped: list[BaseException | None] = []
    noticed = threading.Event()

    def hook(failure: threading.ExceptHookArgs) -> None:
        escaped.append(failure.exc_value)
        noticed.set()

    def fail() -> Output:
        raise ValueError("a step failed")

    monkeypatch.setattr(threading, "excepthook", hook)
    ThreadLauncher().launch(fail)
    assert noticed.wait(10)
    assert str(escaped[0]) == "a step failed"
