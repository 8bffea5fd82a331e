"""Model workers without a server around them: started as the launcher starts them, driven by the router's own loop."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lightserve.boot import Boot, write_boot
from lightserve.children import Children, describe_exit
from lightserve.config import ServerConfig
from lightserve.ipc.links import Inbox
from lightserve.ipc.messages import (
    AbortMsg,
    DetokenizerInbox,
    FailMsg,
    FatalMsg,
    FinishCode,
    GenerateMsg,
    LauncherInbox,
    LoadMsg,
    ReadyMsg,
    RouterInbox,
    ServingMsg,
    StartMsg,
    StepPlan,
    StepResult,
    TextParams,
    TokensMsg,
    count_int32,
    pack_int32,
    unpack_int32,
    unpack_int64,
)
from lightserve.model_worker.profiling import GpuProfile, WorkerStats
from lightserve.preparation import prepare
from lightserve.router.process import Router, make_admission, make_limits
from lightserve.router.scheduler import Scheduler
from lightserve.router.worker_client import WorkerClient
from lightserve.run_dir import run_directory
from lightserve.sampling_params import SamplingParams

_GREEDY = SamplingParams(1, temperature=0.0, ignore_eos=True)
_COMMANDS = {"model_worker": ("-m", "lightserve.model_worker.process")}


class EngineError(Exception):
    """A worker ended, or a request failed."""


@dataclass(frozen=True)
class Work:
    """One request.

    Attributes:
        prompt_ids: At least one.
        output_len: Tokens that it is to produce.
        sampling: The rest of its parameters; greedy unless given.
        abort_after: Its client leaves once it has so many; 0: it stays.
    """

    prompt_ids: Sequence[int]
    output_len: int
    sampling: SamplingParams = _GREEDY
    abort_after: int = 0


@dataclass(frozen=True)
class Step:
    """What one turn of the router's loop asked for, and when it had the result of the turn before.

    Attributes:
        used_slots: That requests hold in this step, those it writes included.
    """

    num_decode: int
    num_prefill_tokens: int
    used_slots: int
    done_s: float


class EngineHost:
    """Workers that are ready, and a router's loop that feeds them.

    Attributes:
        boot: Settings and facts of the model.
        start_s: From the start of the worker processes to all of them being ready.
        num_slots: Of the pool.
        note: How it was sized.
    """

    def __init__(self, boot: Boot, start_s: float) -> None:
        self.boot = boot
        self.start_s = start_s
        self._client = WorkerClient(boot.run_dir, boot.config.tp)
        reply = self._client.load()
        self.num_slots, self.note = reply.max_total_token_num, reply.note
        limits = make_limits(boot, self.num_slots)
        self._mail = _Mail()
        self._scheduler = Scheduler(limits, make_admission(boot, limits), self._mail.take)
        self._workers = _ObservedWorkers(self._client, self._scheduler)
        self._router = Router(self._mail, self._mail.take, self._scheduler, self._workers)

    @property
    def steps(self) -> list[Step]:
        """What the last run asked of the workers."""
        return self._workers.steps

    @property
    def most_used_slots(self) -> int:
        """Most slots that were in use in a step of the last run."""
        return max(step.used_slots for step in self.steps)

    @property
    def outputs(self) -> list[list[int]]:
        """Ids that the works of the last run produced, in their order."""
        return self._mail.outputs

    def run(self, works: Sequence[Work]) -> float:
        """Run all of these, arrived at once, to their ends.

        Returns:
            Seconds from their arrival to the last token.

        Raises:
            EngineError: A request was refused or failed.
        """
        self._workers.steps.clear()
        self._mail.post(works)
        start = time.perf_counter()
        while self._mail.num_running:
            self._router.turn()
        seconds = time.perf_counter() - start
        while not self._scheduler.is_idle:
            self._router.turn()
        return seconds

    def stats(self) -> WorkerStats:
        """Ask rank 0 for its counters."""
        return msgspec.msgpack.decode(self._client.ask("stats"), type=WorkerStats)

    def profile(self, works: Sequence[Work], path: Path) -> GpuProfile:
        """Run these under a trace of rank 0's GPU, written to ``path``."""
        self._client.ask("profile")
        self.run(works)
        return msgspec.msgpack.decode(self._client.ask("profile", str(path).encode()), type=GpuProfile)

    def close(self) -> None:
        """Hang up; the workers then end."""
        self._client.close()


@contextmanager
def open_engine(config: ServerConfig) -> Iterator[EngineHost]:
    """Start the workers of a server with these settings.

    Raises:
        ConfigError: The settings do not fit the machine or the model.
        EngineError: A worker ended before it was ready.
    """
    with run_directory() as run_dir:
        boot = prepare(config, run_dir, listen_fd=-1)
        write_boot(boot)
        inbox: Inbox[LauncherInbox] = Inbox(str(run_dir), "launcher", LauncherInbox)
        children = Children(_COMMANDS, str(run_dir))
        start = time.perf_counter()
        for rank in range(config.tp):
            children.spawn("model_worker", rank)
        try:
            _await_ready(inbox, children, config.tp)
            host = EngineHost(boot, time.perf_counter() - start)
            yield host
            host.close()
        finally:
            children.close()
            inbox.close()


def _await_ready(inbox: "Inbox[LauncherInbox]", children: Children, num_workers: int) -> None:
    ready: set[str] = set()
    while len(ready) < num_workers:
        message = inbox.receive(timeout_s=0.5)
        match message:
            case ReadyMsg(process):
                ready.add(process)
            case FatalMsg(process, text):
                raise EngineError(f"{process}: {text}")
            case ServingMsg() | None:
                pass
        for name, code in children.reap().items():
            raise EngineError(f"{name} {describe_exit(code)}")


class _Mail:
    """The router's inbox, and what it sends."""

    def __init__(self) -> None:
        self._waiting: list[RouterInbox] = []
        self._works: Sequence[Work] = ()
        self._first_id = 0
        self.outputs: list[list[int]] = []
        self.num_running = 0

    def post(self, works: Sequence[Work]) -> None:
        self._first_id += len(self._works)
        self._works, self.outputs, self.num_running = works, [[] for _ in works], len(works)
        for req_id, work in enumerate(works, self._first_id):
            sampling = msgspec.structs.replace(work.sampling, max_new_tokens=work.output_len)
            self._waiting.append(GenerateMsg(req_id, pack_int32(work.prompt_ids), sampling, TextParams()))

    def receive(self, timeout_s: float | None = None) -> RouterInbox | None:
        return None

    def drain(self) -> list[RouterInbox]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def take(self, message: DetokenizerInbox) -> None:
        match message:
            case TokensMsg():
                self._take_tokens(message)
            case FailMsg():
                raise EngineError(f"request {message.req_id}: {message.error.message}")
            case StartMsg() | LoadMsg():
                pass

    def _take_tokens(self, message: TokensMsg) -> None:
        self.num_running -= len(message.finish) - message.finish.count(FinishCode.NONE)
        indices = (unpack_int64(message.req_ids) - self._first_id).tolist()
        for index, token_id in zip(indices, unpack_int32(message.token_ids).tolist(), strict=True):
            if token_id >= 0:
                self.outputs[index].append(token_id)
                if len(self.outputs[index]) == self._works[index].abort_after:
                    self._waiting.append(AbortMsg([index + self._first_id]))


class _ObservedWorkers:
    """Notes every step on its way to the workers."""

    def __init__(self, client: WorkerClient, scheduler: Scheduler) -> None:
        self._client = client
        self._scheduler = scheduler
        self.steps: list[Step] = []

    def step(self, plan: StepPlan) -> StepResult | None:
        result = self._client.step(plan)
        num_decode = count_int32(plan.decode_rows)
        num_prefill_tokens = count_int32(plan.out_slots) - num_decode
        self.steps.append(Step(num_decode, num_prefill_tokens, self._scheduler.used_slots, time.perf_counter()))
        return result

    def flush(self) -> StepResult | None:
        return self._client.flush()
