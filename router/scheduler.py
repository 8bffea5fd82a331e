"""Decides what every step runs: which requests join, which prompts are prefilled, who decodes, who has ended.

One step is planned ahead of the worker: when step n is planned, the results of step n - 2 and before are known. A
request that ends by length is known in advance and wastes nothing; one that ends by an end-of-sequence id runs one row
in vain, whose result is ignored. The worker runs steps in order, so slots given back when a step's plan is made or a
result arrives may be written by any later plan.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from lightserve.errors import InvariantError
from lightserve.ipc.messages import (
    DetokenizerInbox,
    FailMsg,
    FinishCode,
    GenerateMsg,
    LoadMsg,
    StartMsg,
    StepPlan,
    StepResult,
    pack_int32,
)
from lightserve.router.admission import Admission
from lightserve.router.deadlines import Deadlines
from lightserve.router.holdings import Holdings
from lightserve.router.limits import Limits
from lightserve.router.planned_step import PlannedStep
from lightserve.router.prefill import Prefill
from lightserve.router.request import Req
from lightserve.router.request_errors import NOT_FINITE, TIMEOUT, refusal
from lightserve.router.sampled_tokens import SampledTokens, aborted
from lightserve.router.step_times import StepTimes
from lightserve.router.waiting_queue import WaitingQueue

# Of scripts/simulate_router.py, uneven lengths in 60,000 slots, 1,500 requests at once: who looks at the first alone
# keeps 92.5 % of the pool in use, at four 94.6 %, at 32 97.6 %; but each costs a decision a step, of 19 µs.
_LOOKAHEAD = 4
# There 1 gives 9.47 requests a second, 16 9.52, 64 and 1,024 9.53: more would only let the oldest wait longer.
_MAX_PASSES = 64


class Scheduler:
    """Plans steps and applies their results.

    Args:
        limits: What it must keep to.
        admission: Decides who may join.
        send: Takes messages to the detokenizer.
        clock: Tells the time in seconds.

    Attributes:
        num_steps: Steps planned so far.
        num_pauses: How often a request had to leave the batch for want of slots.
    """

    def __init__(
        self,
        limits: Limits,
        admission: Admission,
        send: Callable[[DetokenizerInbox], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._admission = admission
        self._send = send
        self._clock = clock
        self._eos_ids = np.asarray(limits.eos_token_ids, dtype=np.int32)
        self._reqs: dict[int, Req] = {}
        self._num_arrivals = 0
        self._deadlines = Deadlines()
        self._queue = WaitingQueue(limits.max_queued_reqs, max_passes=_MAX_PASSES, lookahead=_LOOKAHEAD)
        self._holdings = Holdings(limits, admission)
        self._batch = self._holdings.batch
        self._prefill = Prefill(limits, self._queue, self._holdings)
        self._step_times = StepTimes(limits.max_itl_s, limits.least_prefill_tokens)
        self.num_steps = 0
        self._planned: deque[PlannedStep] = deque()
        self._last_result_at = 0.0
        self._fully_planned: list[Req] = []  # their last step was the last one planned
        self.num_pauses = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is known and no result is awaited."""
        return not self._reqs and not self._planned

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def used_slots(self) -> int:
        """Slots that running requests hold."""
        return self._holdings.used_slots

    def load(self) -> LoadMsg:
        """Tell how full the server is."""
        return LoadMsg(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            used_slots=self.used_slots,
            cached_slots=self._holdings.cache.num_unlocked,
            promised_slots=self._admission.peak(),
            requested_slots=self._batch.max_slots + self._queue.max_slots,
            max_total_token_num=self._limits.max_total_token_num,
            num_pauses=self.num_pauses,
        )

    def add(self, message: GenerateMsg) -> None:
        """Queue a request, or refuse it with a ``FailMsg``.

        Raises:
            InvariantError: Its id is in use.
        """
        if message.req_id in self._reqs:
            raise InvariantError(f"request id {message.req_id} is in use")
        self._num_arrivals += 1
        req = Req.from_message(message, self._num_arrivals)
        error = refusal(req, self._limits, queue_is_full=self._queue.is_full)
        if error is not None:
            self._send(FailMsg(req.req_id, error))
            return
        self._reqs[req.req_id] = req
        self._queue.add(req)
        if message.timeout_s:
            self._deadlines.add(req.req_id, self._clock() + message.timeout_s)
        self._send(StartMsg(req.req_id, message.text))

    def abort(self, req_ids: Iterable[int]) -> None:
        """End requests whose clients have left; ids that are not known are no error."""
        reqs = [self._reqs[req_id] for req_id in req_ids if req_id in self._reqs]
        if reqs:
            self._send(aborted([req.req_id for req in reqs]))
        for req in reqs:
            self._observe_end(req, is_natural=False)
            self._end(req)

    def stop(self, req_ids: Iterable[int]) -> None:
        """End requests whose clients have already been told; ids that are not known are no error."""
        for req_id in req_ids:
            if req_id in self._reqs:
                self._observe_end(self._reqs[req_id], is_natural=True)
                self._end(self._reqs[req_id])

    def _fail_overdue(self) -> None:
        for req_id in self._deadlines.overdue(self._clock()):
            self._send(FailMsg(req_id, TIMEOUT))
            self._observe_end(self._reqs[req_id], is_natural=False)
            self._end(self._reqs[req_id])

    def plan(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to run.

        Raises:
            InvariantError: A request waits for ever.
        """
        self._admission.begin_step(self.num_steps)
        self._fail_overdue()
        self._give_back_fully_planned()
        self._pause_until_all_can_decode()
        decode_rows = self._batch.decode_rows
        decode_slots = self._holdings.extend_decodes()
        chunks, new_reqs = self._prefill.plan(self.num_steps, self._prompt_budget(len(decode_rows)))
        if not len(decode_rows) and not chunks:
            self._check_progress()
            return None
        plan = StepPlan(
            step_id=self.num_steps,
            released_rows=pack_int32(self._holdings.released_rows),
            new_reqs=new_reqs,
            decode_rows=pack_int32(decode_rows),
            prefill_rows=pack_int32([chunk.req.row for chunk in chunks]),
            prefill_starts=pack_int32([chunk.start for chunk in chunks]),
            prefill_lens=pack_int32([len(chunk.slots) for chunk in chunks]),
            out_slots=pack_int32(np.concatenate([decode_slots, *(chunk.slots for chunk in chunks)])),
        )
        self._expect(PlannedStep.note(plan, self._batch, decode_rows, chunks, self._clock()))
        self._holdings.released_rows.clear()
        self.num_steps += 1
        return plan

    def _give_back_fully_planned(self) -> None:
        for req in self._fully_planned:
            self._holdings.give_back_slots(req)
        self._fully_planned.clear()

    def _prompt_budget(self, num_decode: int) -> int:
        budget = self._limits.prefill_tokens(num_decode)
        if self._limits.max_itl_s and num_decode:
            return min(budget, self._step_times.prompt_tokens())
        return budget

    def _expect(self, step: PlannedStep) -> None:
        """Await a step's result; who does not end with it goes on to decode."""
        self._planned.append(step)
        self._fully_planned = [self._batch.req_at(row) for row in step.rows[step.is_last].tolist()]
        self._batch.decode_rows = step.rows[~step.is_last]

    def _check_progress(self) -> None:
        if len(self._queue) and not self._planned:
            raise InvariantError(
                f"nothing runs, {self._holdings.cache.num_available} of {self._limits.max_total_token_num} slots and "
                f"{len(self._batch.reqs) - len(self._batch)} rows are free, yet {len(self._queue)} requests wait"
            )

    def _pause_until_all_can_decode(self) -> None:
        """Make the youngest wait until there is a slot for each of the others. The oldest is never paused."""
        while self._holdings.cache.num_available < len(self._batch.decode_rows):
            holders = self._holdings.holders
            if len(holders) < 2:
                raise InvariantError(f"one request alone overflows {self._limits.max_total_token_num} slots")
            self._pause(max(holders, key=lambda req: req.rank))

    def _pause(self, req: Req) -> None:
        """Put a request back into the queue, with the ids known so far.

        The token in flight is forgotten: its noise depends on its position alone, so it is sampled again.
        """
        req.ids = self._holdings.known_ids(req)
        self._leave_batch(req)
        self._queue.put_back(req)
        self.num_pauses += 1

    def apply(self, result: StepResult) -> None:
        """Take in what a step sampled: send the tokens on, end the requests that have ended.

        Raises:
            InvariantError: It is not the result of the oldest step planned.
        """
        step = self._planned.popleft()
        sampled = SampledTokens.read(result, step, self._batch, self._eos_ids)
        self._observe_time(step)
        counts = sampled.counts
        if counts.any():
            self._batch.ids[step.rows[counts], step.positions[counts]] = sampled.token_ids[counts]
            self._send(sampled.message())
        for row in step.rows[sampled.fails].tolist():
            self._fail(self._batch.req_at(row))
        for row, position, finish in sampled.endings():
            req = self._batch.req_at(row)
            output_len = position + 1 - req.prompt_len
            self._admission.observe_end(row, output_len, is_natural=finish == FinishCode.STOP)
            self._end(req)

    def _observe_time(self, step: PlannedStep) -> None:
        now = self._clock()
        self._step_times.observe(step.num_prompt_tokens, now - max(step.planned_at, self._last_result_at))
        self._last_result_at = now

    def _fail(self, req: Req) -> None:
        """End a request whose logits were not finite; nobody shall read what it has written."""
        self._holdings.cache.discard(req.ids, req.cache_salt, req.matched_len)
        self._send(FailMsg(req.req_id, NOT_FINITE))
        self._end(req, keeps=False)

    def _observe_end(self, req: Req, *, is_natural: bool) -> None:
        if req.is_running:
            output_len = max(0, int(self._batch.seq_lens[req.row]) - req.prompt_len)
            self._admission.observe_end(req.row, output_len, is_natural=is_natural)

    def _end(self, req: Req, *, keeps: bool = True) -> None:
        """Forget a request, in whatever state it is."""
        del self._reqs[req.req_id]
        self._deadlines.remove(req.req_id)
        if req.is_running:
            self._leave_batch(req, keeps=keeps)
        else:
            self._queue.remove(req)

    def _leave_batch(self, req: Req, *, keeps: bool = True) -> None:
        self._prefill.forget(req)
        self._holdings.leave(req, keeps=keeps)
