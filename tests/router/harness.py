"""A router with its real loop, a fake inbox and a fake worker, run turn by turn."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lightserve.ipc.messages import (
    DetokenizerInbox,
    ErrorInfo,
    FailMsg,
    FinishCode,
    GenerateMsg,
    LoadMsg,
    RouterInbox,
    StartMsg,
    StepPlan,
    StepResult,
    TextParams,
    TokensMsg,
    pack_int32,
    unpack_int32,
    unpack_int64,
)
from lightserve.router.admission import Admission, ConservativeAdmission
from lightserve.router.limits import Limits
from lightserve.router.process import Router
from lightserve.router.scheduler import Scheduler
from lightserve.sampling_params import SamplingParams
from tests.router.fake_worker import FakeWorker

LIMITS = Limits(
    max_total_token_num=200,
    max_req_total_len=150,
    running_max_req_size=8,
    batch_max_tokens=24,
    chunked_prefill_size=16,
    max_queued_reqs=1000,
    eos_token_ids=(7,),
)


class FakeInbox:
    """Holds what has been put into it; waiting for ever on an empty one would hang, so it fails.

    Args:
        sleep: Lets time pass.
    """

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep = sleep
        self.messages: deque[RouterInbox] = deque()
        self.late_messages: deque[RouterInbox] = deque()
        self.num_waits = 0

    def receive(self, timeout_s: float | None = None) -> RouterInbox | None:
        """Take one message; of late ones, one comes in the middle of each wait that has an end."""
        if timeout_s is None:
            self.num_waits += 1
            return self.messages.popleft()
        if self.messages:
            return self.messages.popleft()
        self._sleep(timeout_s / 2 if self.late_messages else timeout_s)
        return self.late_messages.popleft() if self.late_messages else None

    def drain(self) -> list[RouterInbox]:
        """Take all messages."""
        messages = list(self.messages)
        self.messages.clear()
        return messages


@dataclass
class Seen:
    """What the detokenizer was told of one request."""

    output_ids: list[int] = field(default_factory=list)
    finish: FinishCode = FinishCode.NONE
    cached_len: int = 0
    error: ErrorInfo | None = None

    @property
    def has_ended(self) -> bool:
        """Whether its terminal entry has come."""
        return self.finish != FinishCode.NONE or self.error is not None


class Harness:
    """Drives a router and keeps what it says."""

    def __init__(self, admission: Admission | None = None, **changes: Any) -> None:
        self.limits = replace(LIMITS, **changes)
        self.seen: dict[int, Seen] = {}
        self.loads: list[LoadMsg] = []
        self.finished: list[int] = []
        self.inbox = FakeInbox(self.sleep)
        self.worker = FakeWorker(
            self.limits.max_total_token_num, self.limits.running_max_req_size, self.limits.max_req_total_len
        )
        self.now = 0.0
        self.busy_until = 0.0
        self.seconds_per_step: Callable[[StepPlan], float] = lambda plan: 1.0
        self.admission = admission or ConservativeAdmission(
            self.limits.max_total_token_num, self.limits.running_max_req_size
        )
        self.scheduler = Scheduler(self.limits, self.admission, self.take, self.clock)
        self.router = Router(self.inbox, self.take, self.scheduler, self, self.clock)

    def clock(self) -> float:
        """Tell the time: it passes while the worker runs."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def take(self, message: DetokenizerInbox) -> None:
        """Play the detokenizer, which accepts nothing after a request's terminal entry."""
        match message:
            case StartMsg(req_id):
                assert req_id not in self.seen
                self.seen[req_id] = Seen()
            case FailMsg(req_id, error):
                seen = self.seen.setdefault(req_id, Seen())
                assert not seen.has_ended
                seen.error = error
            case TokensMsg():
                self.take_tokens(message)
            case LoadMsg():
                self.loads.append(message)

    def take_tokens(self, message: TokensMsg) -> None:
        """Append a step's tokens."""
        req_ids = unpack_int64(message.req_ids).tolist()
        assert len(set(req_ids)) == len(req_ids)
        token_ids = unpack_int32(message.token_ids).tolist()
        cached_lens = unpack_int32(message.cached_lens).tolist() or [0] * len(req_ids)
        for req_id, token_id, code, cached_len in zip(req_ids, token_ids, message.finish, cached_lens, strict=True):
            seen = self.seen[req_id]
            seen.cached_len += cached_len
            assert not seen.has_ended
            if token_id >= 0:
                seen.output_ids.append(token_id)
            seen.finish = FinishCode(code)
            if seen.has_ended:
                self.finished.append(req_id)

    def step(self, plan: StepPlan) -> StepResult | None:
        """Play the workers: the result of the step before comes when that step has taken its time."""
        self.now = max(self.now, self.busy_until)
        self.busy_until = self.now + self.seconds_per_step(plan)
        return self.worker.step(plan)

    def flush(self) -> StepResult | None:
        """Play the workers."""
        self.now = max(self.now, self.busy_until)
        return self.worker.flush()

    def submit(
        self, req_id: int, prompt_ids: list[int], sampling: SamplingParams, *, late: bool = False, **more: Any
    ) -> None:
        """Put a request into the inbox, or let it come while the router waits there."""
        messages = self.inbox.late_messages if late else self.inbox.messages
        messages.append(GenerateMsg(req_id, pack_int32(prompt_ids), sampling, TextParams(), **more))

    def turn(self) -> None:
        """Let the router do one turn, and look at what it holds."""
        self.router.turn()
        load = self.scheduler.load()
        assert load.used_slots + load.cached_slots <= self.limits.max_total_token_num
        assert self.admission.keeps_promise()

    def run(self, max_turns: int = 20_000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(max_turns):
            if self.scheduler.is_idle and not self.inbox.messages:
                return
            self.turn()
        raise AssertionError(f"not idle after {max_turns} turns")
