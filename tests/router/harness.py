"""A router with its real loop, a fake inbox and a fake worker, run turn by turn."""

from collections import deque
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
    TextParams,
    TokensMsg,
    pack_int32,
    unpack_int32,
    unpack_int64,
)
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
    """Holds what has been put into it; waiting on an empty one would hang, so it fails."""

    def __init__(self) -> None:
        self.messages: deque[RouterInbox] = deque()
        self.num_waits = 0

    def receive(self, timeout_s: float | None = None) -> RouterInbox | None:
        """Take one message."""
        self.num_waits += 1
        return self.messages.popleft()

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
    error: ErrorInfo | None = None

    @property
    def has_ended(self) -> bool:
        """Whether its terminal entry has come."""
        return self.finish != FinishCode.NONE or self.error is not None


class Harness:
    """Drives a router and keeps what it says."""

    def __init__(self, limits: Limits = LIMITS, **changes: Any) -> None:
        self.limits = replace(limits, **changes)
        self.seen: dict[int, Seen] = {}
        self.loads: list[LoadMsg] = []
        self.finished: list[int] = []
        self.inbox = FakeInbox()
        self.worker = FakeWorker(
            self.limits.max_total_token_num, self.limits.running_max_req_size, self.limits.max_req_total_len
        )
        self.scheduler = Scheduler(self.limits, self.take)
        self.router = Router(self.inbox, self.take, self.scheduler, self.worker)

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
        for req_id, token_id, code in zip(
            req_ids, unpack_int32(message.token_ids).tolist(), message.finish, strict=True
        ):
            seen = self.seen[req_id]
            assert not seen.has_ended
            if token_id >= 0:
                seen.output_ids.append(token_id)
            seen.finish = FinishCode(code)
            if seen.has_ended:
                self.finished.append(req_id)

    def submit(self, req_id: int, prompt_ids: list[int], sampling: SamplingParams) -> None:
        """Put a request into the inbox."""
        self.inbox.messages.append(GenerateMsg(req_id, pack_int32(prompt_ids), sampling, TextParams()))

    def turn(self) -> None:
        """Let the router do one turn, and look at what it holds."""
        self.router.turn()
        load = self.loads[-1]
        assert load.used_slots + load.cached_slots <= self.limits.max_total_token_num
        assert load.promised_slots <= self.limits.max_total_token_num

    def run(self, max_turns: int = 20_000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(max_turns):
            if self.scheduler.is_idle and not self.inbox.messages:
                return
            self.turn()
        raise AssertionError(f"not idle after {max_turns} turns")
