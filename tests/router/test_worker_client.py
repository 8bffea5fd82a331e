import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import rpyc

from lightserve.child import process_name
from lightserve.errors import ConfigError, InvariantError
from lightserve.ipc.messages import LoadReply, StepPlan, StepResult, pack_float32, pack_int32, unpack_int32
from lightserve.ipc.worker_link import WorkerListener
from lightserve.router.worker_client import WorkerClient

encode = msgspec.msgpack.encode


class FakeService(rpyc.Service):  # type: ignore[misc]
    """One rank: answers each step with the result of the one before, whose id is the rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step_ids: list[int] = []
        self.connections: list[rpyc.Connection] = []
        self.owed: int | None = None
        self.load_error: Exception | None = None
        self.dies = False

    def on_connect(self, conn: rpyc.Connection) -> None:
        self.connections.append(conn)

    def exposed_load(self, payload: bytes) -> bytes:
        if self.load_error:
            raise self.load_error
        return encode(LoadReply(1000 - self.rank, f"rank {self.rank}"))

    def exposed_step(self, payload: bytes) -> bytes:
        if self.dies:
            self.connections[-1].close()
        plan = msgspec.msgpack.decode(payload, type=StepPlan)
        self.step_ids.append(plan.step_id)
        result = self.exposed_flush()
        self.owed = plan.step_id
        return result

    def exposed_flush(self) -> bytes:
        step_id, self.owed = self.owed, None
        if step_id is None:
            return b""
        return encode(StepResult(step_id, pack_int32([self.rank]), pack_float32([0.0])))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[FakeService]]:
    services = [FakeService(rank) for rank in range(2)]
    threads = [
        serving(WorkerListener(str(tmp_path / process_name("model_worker", rank))), service)
        for rank, service in enumerate(services)
    ]
    yield services
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def serving(listener: WorkerListener, service: FakeService) -> threading.Thread:
    thread = threading.Thread(target=listener.serve, args=(service,), daemon=True)
    thread.start()
    return thread


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, b"", [], b"", b"", b"", b"", b"")


@pytest.mark.usefixtures("ranks")
def test_the_pool_is_as_large_as_the_smallest_rank_allows(tmp_path: Path) -> None:
    client = WorkerClient(str(tmp_path), 2)
    assert client.load() == LoadReply(999, "rank 1")
    client.close()


def test_every_rank_gets_every_plan_and_rank_0_answers_one_step_late(ranks: list[FakeService], tmp_path: Path) -> None:
    client = WorkerClient(str(tmp_path), 2)
    results = [client.step(plan(0)), client.step(plan(1)), client.flush(), client.flush()]
    assert [result and result.step_id for result in results] == [None, 0, 1, None]
    assert results[1] is not None
    assert unpack_int32(results[1].token_ids).tolist() == [0]
    assert [rank.step_ids for rank in ranks] == [[0, 1], [0, 1]]
    client.close()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_worker_is_loud(ranks: list[FakeService], tmp_path: Path, lost: int) -> None:
    client = WorkerClient(str(tmp_path), 2)
    client.step(plan(0))
    ranks[lost].dies = True
    with pytest.raises(InvariantError, match="closed its connection"):
        client.step(plan(1))
    client.close()


def test_an_operators_mistake_arrives_as_one(ranks: list[FakeService], tmp_path: Path) -> None:
    ranks[1].load_error = ConfigError("--max_total_token_num 99 is too many: 50 fit")
    client = WorkerClient(str(tmp_path), 2)
    with pytest.raises(ConfigError, match="50 fit"):
        client.load()
    client.close()


def test_a_client_waits_for_a_worker_that_listens_later(tmp_path: Path) -> None:
    clients: list[WorkerClient] = []
    connecting = threading.Thread(target=lambda: clients.append(WorkerClient(str(tmp_path), 1)))
    connecting.start()
    thread = serving(WorkerListener(str(tmp_path / "model_worker-0")), FakeService(0))
    connecting.join(timeout=10)
    assert clients[0].load().max_total_token_num == 1000
    clients[0].close()
    thread.join(10)
