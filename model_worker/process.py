"""The model worker's process: one rank's engine, called by the router through rpyc on a unix socket."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import rpyc
from rpyc.utils.server import OneShotServer

from lightserve.boot import read_boot
from lightserve.child import freeze_garbage_collector, run_child
from lightserve.ipc.links import Outbox
from lightserve.ipc.messages import LoadReply, ReadyMsg, StepPlan
from lightserve.model_worker.engine import Engine, StepOutput
from lightserve.model_worker.kv_cache import PoolSize
from lightserve.model_worker.loading import load_engine

_PROTOCOL = {"allow_pickle": False, "allow_public_attrs": False, "sync_request_timeout": None}


class ComputeThread:
    """Runs steps in order, off the thread that talks to the router, so that a call can return the step before.

    An error in a step is not caught: it ends the thread and so, by ``run_child``, the process, with its cause.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], StepOutput], queue.SimpleQueue[StepOutput]]]
        self._jobs = queue.SimpleQueue()
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    def submit(self, job: Callable[[], StepOutput]) -> "queue.SimpleQueue[StepOutput]":
        """Run ``job`` after those before it; what it returns can be got from the queue, once."""
        done: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        self._jobs.put((job, done))
        return done

    def _run(self) -> None:
        while True:
            job, done = self._jobs.get()
            done.put(job())


class WorkerService(rpyc.Service):  # type: ignore[misc]  # rpyc has no types
    """The remote interface: plain bytes in and out, results one step late."""

    def __init__(self, engine: Engine, pool: PoolSize) -> None:
        super().__init__()
        self._engine = engine
        self._pool = pool
        self._compute = ComputeThread()
        self._pending: queue.SimpleQueue[StepOutput] | None = None

    def exposed_load(self, _: bytes) -> bytes:
        """Say how many slots there are, as a ``LoadReply``."""
        return msgspec.msgpack.encode(LoadReply(self._pool.num_slots, self._pool.note))

    def exposed_step(self, raw_plan: bytes) -> bytes:
        """Launch a ``StepPlan``, then wait for the plan before it and return its ``StepResult``, or nothing."""
        launched = self._compute.submit(lambda: self._engine.step(msgspec.msgpack.decode(raw_plan, type=StepPlan)))
        return self._swap_pending(launched)

    def exposed_flush(self) -> bytes:
        """Wait for the last plan and return its ``StepResult``, or nothing."""
        return self._swap_pending(None)

    def _swap_pending(self, launched: "queue.SimpleQueue[StepOutput] | None") -> bytes:
        previous, self._pending = self._pending, launched
        return b"" if previous is None else msgspec.msgpack.encode(previous.get().result())


def main(run_dir: str, rank: int) -> None:
    """Load the model, then serve the router until it leaves."""
    boot = read_boot(run_dir)
    loaded = load_engine(boot, rank)
    service = WorkerService(loaded.engine, loaded.pool)
    server = OneShotServer(service, socket_path=str(Path(run_dir, f"model_worker-{rank}")), protocol_config=_PROTOCOL)
    freeze_garbage_collector()
    Outbox(run_dir, "launcher").send(ReadyMsg(f"model_worker-{rank}"))
    server.start()


if __name__ == "__main__":
    run_child("model_worker", main)
