"""The client processes seen from the command: dealt their shares, started together, gathered."""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from benchmark.messages import (
    ClientMsg,
    Finished,
    Job,
    Outcome,
    Progress,
    Ready,
    Start,
    Stop,
    TimedRequest,
    frame,
    read_frame,
)

# At 20 tokens/s each they take a sixth of a core (docs/performance.md); a process short of time measures itself.
_STREAMS_PER_PROCESS = 750
_START_DELAY_S = 0.1  # for the start message to reach every process
_READ_LIMIT_BYTES = 1 << 20


class ClientDiedError(Exception):
    """A client process ended before its job did; its own message is on stderr."""


@dataclass(frozen=True)
class FleetResult:
    """What all client processes brought home.

    Attributes:
        outcomes: Of every request that has ended, in workload order.
        cpu_fracs: Share of a core that each process used until its last request ended.
        stopped_by: The signal that ended the run, most likely before all requests had; None: there was none.
    """

    outcomes: list[Outcome]
    cpu_fracs: list[float]
    stopped_by: signal.Signals | None


def choose_num_processes(num_requests: int, max_concurrency: int | None) -> int:
    """Choose as many client processes as the streams in flight may need, on at most half the cores."""
    num_streams = min(num_requests, max_concurrency or num_requests)
    wanted = -(-num_streams // _STREAMS_PER_PROCESS)
    return max(1, min(wanted, (os.cpu_count() or 1) // 2))


def split_job(job: Job, num_processes: int) -> list[Job]:
    """Deal a job's requests, and its concurrency, out to so many processes (fewer when there is too little)."""
    count = min(num_processes, len(job.requests), job.max_concurrency or num_processes)
    limits: list[int | None] = [None] * count
    if job.max_concurrency is not None:
        each, rest = divmod(job.max_concurrency, count)
        limits = [each + (i < rest) for i in range(count)]
    return [
        msgspec.structs.replace(job, requests=job.requests[i::count], max_concurrency=limits[i]) for i in range(count)
    ]


def run_fleet(
    job: Job,
    num_processes: int,
    on_progress: Callable[[Progress], None],
    stop_signals: Sequence[signal.Signals] = (),
) -> FleetResult:
    """Run a job in so many processes.

    Args:
        on_progress: Called with the sums over all processes, about once a second per process.
        stop_signals: Those that end the run with what there is by then; a second one does what it always does.

    Raises:
        ClientDiedError: A client process failed.
    """
    return asyncio.run(_run(split_job(job, num_processes), on_progress, stop_signals))


async def _run(
    jobs: list[Job], on_progress: Callable[[Progress], None], stop_signals: Sequence[signal.Signals]
) -> FleetResult:
    stopping = _first_of(stop_signals)
    clients = [_ClientProcess(await _spawn()) for _ in jobs]
    try:
        await asyncio.gather(*(client.prepare(job) for client, job in zip(clients, jobs, strict=True)))
        start_s = time.monotonic() + _START_DELAY_S
        for client in clients:
            client.send(Start(start_s))
        # A signal that came before now stops the clients as soon as they have started.
        stopping.add_done_callback(partial(_stop, clients))
        finished = await asyncio.gather(
            *(client.follow(lambda: on_progress(_sum(c.progress for c in clients))) for client in clients)
        )
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    outcomes = sorted((o for part in finished for o in part.outcomes), key=lambda outcome: outcome.index)
    stopped_by = stopping.result() if stopping.done() else None
    return FleetResult(outcomes, [_cpu_frac(part, start_s) for part in finished], stopped_by)


def _first_of(signals: Sequence[signal.Signals]) -> "asyncio.Future[signal.Signals]":
    """Wait for the first of some signals; from then on all of them do what they do by default."""
    loop = asyncio.get_running_loop()
    first: asyncio.Future[signal.Signals] = loop.create_future()

    def take(signum: signal.Signals) -> None:
        for other in signals:
            loop.remove_signal_handler(other)
        first.set_result(signum)

    for signum in signals:
        loop.add_signal_handler(signum, take, signum)
    return first


def _stop(clients: "Sequence[_ClientProcess]", _: "asyncio.Future[signal.Signals]") -> None:
    for client in clients:
        client.send(Stop())


def _sum(parts: Iterable[Progress]) -> Progress:
    return Progress(*map(sum, zip(*map(msgspec.structs.astuple, parts), strict=True)))


async def _spawn() -> Process:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "benchmark.client_process"),
        stdin=PIPE,
        stdout=PIPE,
        env=os.environ | {"PYTHONPATH": path},
        limit=_READ_LIMIT_BYTES,
        start_new_session=True,  # a terminal's Ctrl-C is the command's; they end when their stdin does
    )


class _ClientProcess:
    def __init__(self, process: Process) -> None:
        if process.stdin is None or process.stdout is None:
            raise ClientDiedError("a client process has no pipes")
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self.progress = Progress(0, 0, 0)

    def send(self, message: Job | Start | Stop) -> None:
        self._stdin.write(frame(message))

    async def prepare(self, job: Job) -> None:
        self.send(job)
        await self._stdin.drain()
        message = await self._receive()
        if not isinstance(message, Ready):
            raise ClientDiedError(f"a client process began with {type(message).__name__}")

    async def follow(self, on_progress: Callable[[], None]) -> Finished:
        while True:
            match await self._receive():
                case Finished() as finished:
                    return finished
                case Progress() as progress:
                    self.progress = progress
                    on_progress()
                case Ready():
                    raise ClientDiedError("a client process was ready twice")

    async def _receive(self) -> ClientMsg:
        try:
            return msgspec.msgpack.decode(await read_frame(self._stdout), type=ClientMsg)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ClientDiedError(f"client process {self._process.pid} died") from error

    async def close(self) -> None:
        if self._process.returncode is None:
            self._stdin.close()  # it ends when its stdin does
        await self._process.wait()


def _cpu_frac(finished: Finished, start_s: float) -> float:
    last_s = max((outcome.end_s for outcome in finished.outcomes), default=start_s)
    return finished.cpu_s / max(last_s - start_s, 1e-9)


def schedule_requests(bodies: list[bytes], offsets_s: list[float]) -> list[TimedRequest]:
    """Join bodies with their times, in order of time."""
    requests = [TimedRequest(i, t, b) for i, (t, b) in enumerate(zip(offsets_s, bodies, strict=True))]
    return sorted(requests, key=lambda request: request.offset_s)
