"""The model worker's process: one rank's engine, called by the router through rpyc on a unix socket."""

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import rpyc

from lightserve.boot import Boot, read_boot
from lightserve.child import fatal, freeze_garbage_collector, process_name, run_child
from lightserve.ipc.messages import LoadReply, StepPlan, StepResult
from lightserve.ipc.worker_link import serve_worker
from lightserve.model_worker.cpu.loading import load_cpu_engine
from lightserve.model_worker.engine import Engine, Runner, StepOutput
from lightserve.model_worker.kv_cache import PoolSize
from lightserve.model_worker.loading import LoadedEngine
from lightserve.model_worker.profiling import GpuProfiler, WorkerStats, gpu_reserved_bytes

T = TypeVar("T")


class StepLauncher(Protocol):
    """Starts steps in order, and goes on while they run."""

    def call(self, job: Callable[[], T]) -> T:
        """Run a job where steps run, and wait for what it returns."""

    def launch(self, step: Callable[[], StepOutput]) -> StepOutput:
        """Start a step behind those before it."""


class DirectLauncher:
    """For a device that computes by itself: launching a step takes a fraction of running it."""

    def call(self, job: Callable[[], T]) -> T:
        """Run a job on this thread."""
        return job()

    def launch(self, step: Callable[[], StepOutput]) -> StepOutput:
        """Launch a step on this thread."""
        return step()


class ThreadLauncher:
    """For steps that this process computes: on a thread of their own, so that a call can return the step before.

    No other thread may multiply, not even to load the model: OpenMP's threads wait for the next product without
    sleeping only while those of all threads' teams are no more than the CPUs. With a second team about, a step of
    SmolLM2-135M on two cores takes 39 ms instead of 26.

    An error in a job is not caught: it ends the thread and so, by ``run_child``, the process, with its cause.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    def call(self, job: Callable[[], T]) -> T:
        """Leave a job to the thread and wait for it."""
        done: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._jobs.put(lambda: done.put(job()))
        return done.get()

    def launch(self, step: Callable[[], StepOutput]) -> "_Promise":
        """Leave a step to the thread."""
        promise = _Promise()
        self._jobs.put(lambda: promise.outputs.put(step()))
        return promise

    def _run(self) -> None:
        while True:
            self._jobs.get()()


class _Promise:
    def __init__(self) -> None:
        self.outputs: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()

    @property
    def has_ended(self) -> bool:
        return not self.outputs.empty()

    def result(self) -> StepResult:
        return self.outputs.get().result()


class WorkerService(rpyc.Service):  # type: ignore[misc]  # rpyc has no types
    """The remote interface: plain bytes in and out, results one step late.

    An error in a step ends the process. Told to the router alone, it would not be heard while that waits for a rank
    which, in a collective operation, waits for this one.
    """

    def __init__(self, engine: Engine[Runner], pool: PoolSize, launcher: StepLauncher) -> None:
        super().__init__()
        self._launch_s = 0.0
        self._profiler: GpuProfiler | None = None
        self._engine = engine
        self._pool = pool
        self._launcher = launcher
        self._decoder = msgspec.msgpack.Decoder(StepPlan)
        self._encoder = msgspec.msgpack.Encoder()
        self._pending: StepOutput | None = None

    def exposed_load(self, _: bytes) -> bytes:
        """Say how many slots there are, as a ``LoadReply``."""
        return self._encoder.encode(LoadReply(self._pool.num_slots, self._pool.note))

    @fatal
    def exposed_step(self, raw_plan: bytes) -> bytes:
        """Launch a ``StepPlan``, then wait for the plan before it and return its ``StepResult``, or nothing."""
        start = time.perf_counter()
        plan = self._decoder.decode(raw_plan)
        launched = self._launcher.launch(lambda: self._engine.step(plan))
        device_waited = self._pending is not None and self._pending.has_ended
        self._launch_s += time.perf_counter() - start
        return self._swap_pending(launched, device_waited=device_waited)

    @fatal
    def exposed_flush(self) -> bytes:
        """Wait for the last plan and return its ``StepResult``, or nothing."""
        return self._swap_pending(None, device_waited=False)

    def exposed_stats(self, _: bytes) -> bytes:
        """Say what has been done so far, as ``WorkerStats``."""
        return self._encoder.encode(WorkerStats(self._engine.num_steps, self._launch_s, gpu_reserved_bytes()))

    def exposed_profile(self, path: bytes) -> bytes:
        """Start a trace of the GPU, or end the one that runs, write it to ``path`` and sum it up (``GpuProfile``)."""
        if self._profiler is None:
            self._profiler = GpuProfiler()
            return b""
        profile, self._profiler = self._profiler.stop(Path(path.decode())), None
        return self._encoder.encode(profile)

    def _swap_pending(self, launched: StepOutput | None, *, device_waited: bool) -> bytes:
        previous, self._pending = self._pending, launched
        if previous is None:
            return b""
        return self._encoder.encode(msgspec.structs.replace(previous.result(), device_waited=device_waited))


def main(run_dir: str, rank: int) -> None:
    """Load the model, then serve the router until it leaves."""
    boot = read_boot(run_dir)
    launcher: StepLauncher = DirectLauncher() if boot.device == "cuda" else ThreadLauncher()
    loaded = launcher.call(lambda: _load(boot, rank))
    service = WorkerService(loaded.engine, loaded.pool, launcher)
    freeze_garbage_collector()
    serve_worker(run_dir, process_name("model_worker", rank), service)


def _load(boot: Boot, rank: int) -> LoadedEngine[Runner]:
    if boot.device == "cuda":
        from lightserve.model_worker.cuda.loading import load_cuda_engine  # Triton takes long to import

        return load_cuda_engine(boot, rank)
    return load_cpu_engine(boot, rank)


if __name__ == "__main__":
    run_child("model_worker", main)
