"""The model worker's process with a modelled worker in it: ids drawn at random, each step in its time.

``python -m front_end_bench.worker_process PACE RUN_DIR INDEX``, where PACE is a ``WorkerPace`` as JSON.
"""

import sys
import time

import msgspec
import numpy as np
import rpyc
from router_simulation.modelled_worker import ModelledWorker, StepModel
from script_tools.plain_ids import plain_ids

from lightserve.boot import Boot, read_boot
from lightserve.child import freeze_garbage_collector, process_name, run_child
from lightserve.ipc.messages import LoadReply, NewReq, StepPlan, StepResult, count_int32
from lightserve.ipc.worker_link import serve_worker
from lightserve.router.arrays import IdArray, IntArray, RowArray


class WorkerPace(msgspec.Struct, frozen=True):
    """How fast the worker is.

    Attributes:
        step_s: How long a step takes.
        num_full: Rows of a batch that counts as full.
        filling_step_s: What a step takes besides, until the batch has been full.
    """

    step_s: float
    num_full: int
    filling_step_s: float


class RealClock:
    """The time of the machine."""

    @property
    def now_s(self) -> float:
        """Tell the time."""
        return time.monotonic()

    def wait_until(self, at_s: float) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, at_s - time.monotonic()))


class RandomIds:
    """Any plain id, and never the end of a sequence.

    Args:
        vocab_size: Of the model.
        eos_token_ids: Not to be chosen.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._ids = np.setdiff1d(plain_ids(vocab_size), eos_token_ids).astype(np.int32)
        self._rng = np.random.default_rng(0)

    def enter(self, new: NewReq) -> None:
        """Do nothing: who the request is does not matter."""

    def choose(self, rows: RowArray, num_ids: IntArray) -> IdArray:
        """Draw an id for each row."""
        return self._rng.choice(self._ids, len(rows))


class FillingWorker:
    """Delays each step of a batch that has not been full yet.

    Args:
        worker: Runs the steps.
        pace: How long to wait, and what is full.
    """

    def __init__(self, worker: ModelledWorker, pace: WorkerPace) -> None:
        self._worker = worker
        self._pace = pace
        self._has_been_full = False

    def step(self, plan: StepPlan) -> StepResult | None:
        """Launch a step; return the result of the one before, as soon as it is there."""
        num_rows = count_int32(plan.decode_rows) + count_int32(plan.prefill_rows)
        self._has_been_full |= num_rows >= self._pace.num_full
        if not self._has_been_full:
            time.sleep(self._pace.filling_step_s)
        return self._worker.step(plan)

    def flush(self) -> StepResult | None:
        """Return the last result, as soon as it is there."""
        return self._worker.flush()


class WorkerService(rpyc.Service):  # type: ignore[misc]  # rpyc has no types
    """The worker's remote interface: bytes in, bytes out, results one step late."""

    def __init__(self, worker: FillingWorker, num_slots: int) -> None:
        super().__init__()
        self._worker = worker
        self._num_slots = num_slots
        self._decoder = msgspec.msgpack.Decoder(StepPlan)

    def exposed_load(self, _: bytes) -> bytes:
        """Say how many slots there are."""
        return msgspec.msgpack.encode(LoadReply(self._num_slots, "of no memory"))

    def exposed_step(self, raw_plan: bytes) -> bytes:
        """Launch a step; return the result of the one before."""
        return _encode(self._worker.step(self._decoder.decode(raw_plan)))

    def exposed_flush(self) -> bytes:
        """Return the last result."""
        return _encode(self._worker.flush())


def _encode(result: StepResult | None) -> bytes:
    return b"" if result is None else msgspec.msgpack.encode(result)


def main(run_dir: str, index: int) -> None:
    """Serve the router until it leaves."""
    boot = read_boot(run_dir)
    pace = msgspec.json.decode(sys.argv[1], type=WorkerPace)
    service = WorkerService(FillingWorker(_modelled_worker(boot, pace), pace), boot.config.max_total_token_num or 0)
    freeze_garbage_collector()
    serve_worker(run_dir, process_name("model_worker", index), service)


def _modelled_worker(boot: Boot, pace: WorkerPace) -> ModelledWorker:
    model = StepModel("constant", pace.step_s, weights_s=0.0, token_s=0.0, context_token_s=0.0, prompt_pair_s=0.0)
    answer_ids = RandomIds(boot.model.vocab_size, boot.model.eos_token_ids)
    return ModelledWorker(model, RealClock(), answer_ids, boot.config.running_max_req_size)


if __name__ == "__main__":
    run_child("model_worker", main)
