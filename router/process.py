"""The router process: receives requests, plans steps, calls the model workers, sends tokens on."""

import time
from collections.abc import Callable
from typing import Protocol

from lightserve.boot import Boot, read_boot
from lightserve.child import freeze_garbage_collector, run_child
from lightserve.ipc.links import Inbox, Outbox
from lightserve.ipc.messages import (
    AbortMsg,
    DetokenizerInbox,
    GenerateMsg,
    LoadMsg,
    ReadyMsg,
    RouterInbox,
    StepPlan,
    StepResult,
    StopMsg,
)
from lightserve.router.admission import Admission, ConservativeAdmission
from lightserve.router.limits import Limits
from lightserve.router.pace import Pace
from lightserve.router.past_future import PastFutureAdmission
from lightserve.router.scheduler import Scheduler
from lightserve.router.worker_client import WorkerClient

_LOAD_INTERVAL_S = 0.05


class Workers(Protocol):
    """What the router asks of the model workers."""

    def step(self, plan: StepPlan) -> StepResult | None:
        """Launch a step and return the result of the one before it."""

    def flush(self) -> StepResult | None:
        """Return the result of the last step launched."""


class Messages(Protocol):
    """What the router asks of its inbox."""

    def receive(self, timeout_s: float | None = None) -> RouterInbox | None:
        """Wait for one message."""

    def drain(self) -> list[RouterInbox]:
        """Take all that have arrived."""


class Router:
    """The router's loop.

    Args:
        inbox: Where requests arrive.
        send: Takes messages to the detokenizer.
        scheduler: Decides what runs.
        workers: Run it.
        clock: Tells the time in seconds.
    """

    def __init__(
        self,
        inbox: Messages,
        send: Callable[[DetokenizerInbox], None],
        scheduler: Scheduler,
        workers: Workers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._send = send
        self._scheduler = scheduler
        self._workers = workers
        self._pace = Pace(workers.step, clock)
        self._clock = clock
        self._sent_load: LoadMsg | None = None
        self._load_sent_at = -_LOAD_INTERVAL_S

    def turn(self) -> None:
        """Receive, plan and launch a step, apply the result of the one before."""
        self._receive()
        plan = self._scheduler.plan()
        if plan is not None:
            self._apply(self._pace.step(plan))
        elif not self._scheduler.is_idle:
            self._apply(self._workers.flush())
        self._send_load()

    def _receive(self) -> None:
        if self._scheduler.is_idle:
            self._take_in(self._inbox.receive())
        elif not self._scheduler.num_waiting:
            self._receive_while_busy()
        for message in self._inbox.drain():
            self._take_in(message)

    def _receive_while_busy(self) -> None:
        """Take in what comes before the next step has to be planned."""
        while (spare_s := self._pace.spare_s()) > 0:
            message = self._inbox.receive(spare_s)
            if message is None:
                return
            self._take_in(message)

    def _take_in(self, message: RouterInbox | None) -> None:
        match message:
            case None:
                pass
            case GenerateMsg():
                self._scheduler.add(message)
            case AbortMsg(req_ids):
                self._scheduler.abort(req_ids)
            case StopMsg(req_ids):
                self._scheduler.stop(req_ids)

    def _apply(self, result: StepResult | None) -> None:
        if result is not None:
            self._scheduler.apply(result)

    def _send_load(self) -> None:
        """Tell the load: now and then while it changes all the time, and always before going idle."""
        now = self._clock()
        if now - self._load_sent_at < _LOAD_INTERVAL_S and not self._scheduler.is_idle:
            return
        load = self._scheduler.load()
        if load != self._sent_load:
            self._send(load)
            self._sent_load = load
            self._load_sent_at = now


def main(run_dir: str, index: int) -> None:
    """Run the router; returns never."""
    boot = read_boot(run_dir)
    inbox: Inbox[RouterInbox] = Inbox(run_dir, "router", RouterInbox)
    detokenizer, launcher = Outbox(run_dir, "detokenizer"), Outbox(run_dir, "launcher")
    workers = WorkerClient(run_dir, boot.config.tp)
    reply = workers.load()
    limits = make_limits(boot, reply.max_total_token_num)
    scheduler = Scheduler(limits, make_admission(boot, limits), detokenizer.send)
    router = Router(inbox, detokenizer.send, scheduler, workers)
    launcher.send(ReadyMsg("router", reply.max_total_token_num, reply.note))
    freeze_garbage_collector()
    while True:
        router.turn()


def make_limits(boot: Boot, max_total_token_num: int) -> Limits:
    """Gather the scheduler's limits from the settings and the pool that the workers have."""
    return Limits(
        max_total_token_num=max_total_token_num,
        max_req_total_len=boot.max_req_total_len,
        running_max_req_size=boot.config.running_max_req_size,
        batch_max_tokens=boot.batch_max_tokens,
        chunked_prefill_size=boot.chunked_prefill_size,
        max_queued_reqs=boot.config.max_queued_reqs,
        eos_token_ids=boot.model.eos_token_ids,
        has_prefix_cache=not boot.config.disable_prefix_cache,
        max_itl_s=boot.config.max_itl_ms / 1000,
    )


def make_admission(boot: Boot, limits: Limits) -> Admission:
    """Make the policy that the settings name."""
    pool, max_rows = limits.max_total_token_num, limits.running_max_req_size
    match boot.config.router_policy:
        case "conservative":
            return ConservativeAdmission(pool, max_rows)
        case "past_future":
            return PastFutureAdmission(pool, max_rows, limits.max_slots_per_req, boot.config.max_overflow_prob)


if __name__ == "__main__":
    run_child("router", main)
