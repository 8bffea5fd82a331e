"""Decides what every step runs: which requests join, which prompts are prefilled, who decodes, who has ended.

One step is planned ahead of the worker: when step n is planned, the results of step n - 2 and before are known. A
request that ends by length is known in advance and wastes nothing; one that ends by an end-of-sequence id runs one row
in vain, whose result is ignored. The worker runs steps in order, so slots given back when a step's plan is made or a
result arrives may be written by any later plan.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lightserve.errors import InvariantError
from lightserve.ipc.messages import (
    DetokenizerInbox,
    ErrorInfo,
    FailMsg,
    FinishCode,
    GenerateMsg,
    LoadMsg,
    NewReq,
    StartMsg,
    StepPlan,
    StepResult,
    TokensMsg,
    pack_float32,
    pack_int32,
    pack_int64,
    unpack_float32,
    unpack_int32,
)
from lightserve.router.admission import Admission, Claim
from lightserve.router.arrays import BoolArray, FinishArray, IdArray, RowArray, SlotArray
from lightserve.router.batch import Batch
from lightserve.router.deadlines import Deadlines
from lightserve.router.limits import Limits
from lightserve.router.planned_step import NO_LENS, Chunk, PlannedStep
from lightserve.router.prefix_cache import Match, Node, PrefixCache
from lightserve.router.request import Req
from lightserve.router.slots import SlotAllocator
from lightserve.router.step_times import StepTimes
from lightserve.router.waiting_queue import WaitingQueue

_MAX_PASSES = 64
_LOOKAHEAD = 4
# Prompt ids that are worth waiting one step for, when another request is just computing them.
_MIN_PENDING = 64


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
        self._slots = SlotAllocator(limits.max_total_token_num)
        self._cache = PrefixCache(self._slots, admission, is_enabled=limits.has_prefix_cache)
        self._batch = Batch(limits.running_max_req_size, limits.max_slots_per_req)
        self._step_times = StepTimes(limits.max_itl_s, limits.least_prefill_tokens)
        self.num_steps = 0
        self._planned: deque[PlannedStep] = deque()
        self._last_result_at = 0.0
        self._prefilling: Req | None = None  # its prompt is in part planned; there is never a second one
        self._fully_planned: list[Req] = []  # their last step was the last one planned
        self._released_rows: list[int] = []  # for the next plan to tell
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
        return self._slots.num_used - self._cache.num_unlocked

    def load(self) -> LoadMsg:
        """Tell how full the server is."""
        return LoadMsg(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            used_slots=self.used_slots,
            cached_slots=self._cache.num_unlocked,
            promised_slots=self._admission.peak(),
            requested_slots=self._batch.max_slots + self._queue.max_slots,
            max_total_token_num=self._limits.max_total_token_num,
        )

    # ---- requests come and go ----
    def add(self, message: GenerateMsg) -> None:
        """Queue a request, or refuse it with a ``FailMsg``.

        Raises:
            InvariantError: Its id is in use.
        """
        if message.req_id in self._reqs:
            raise InvariantError(f"request id {message.req_id} is in use")
        self._num_arrivals += 1
        req = Req.from_message(message, self._num_arrivals)
        refusal = self._refusal(req)
        if refusal is not None:
            self._send(FailMsg(req.req_id, refusal))
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
            self._send_tokens(
                np.array([req.req_id for req in reqs], dtype=np.int64),
                np.full(len(reqs), -1, dtype=np.int32),
                np.zeros(len(reqs), dtype=np.float32),
                np.full(len(reqs), FinishCode.ABORT, dtype=np.uint8),
            )
        for req in reqs:
            self._observe_end(req, is_natural=False)
            self._end(req)

    def stop(self, req_ids: Iterable[int]) -> None:
        """End requests whose clients have already been told; ids that are not known are no error."""
        for req_id in req_ids:
            if req_id in self._reqs:
                self._observe_end(self._reqs[req_id], is_natural=True)
                self._end(self._reqs[req_id])

    def _refusal(self, req: Req) -> ErrorInfo | None:
        limits = self._limits
        total_len = req.prompt_len + req.sampling.max_new_tokens
        asked = f"Prompt ({req.prompt_len}) and max_new_tokens ({req.sampling.max_new_tokens})"
        if total_len > limits.max_req_total_len:
            message = f"{asked} exceed max_req_total_len ({limits.max_req_total_len})."
            return ErrorInfo(400, "context_length_exceeded", message)
        if req.max_slots > limits.max_total_token_num:
            message = f"{asked} can never fit max_total_token_num ({limits.max_total_token_num})."
            return ErrorInfo(400, "context_length_exceeded", message)
        if self._queue.is_full:
            return ErrorInfo(429, "queue_full", f"{limits.max_queued_reqs} requests are waiting already.")
        return None

    def _fail_overdue(self) -> None:
        for req_id in self._deadlines.overdue(self._clock()):
            self._send(FailMsg(req_id, ErrorInfo(504, "timeout", "The request's own time limit has passed.")))
            self._observe_end(self._reqs[req_id], is_natural=False)
            self._end(self._reqs[req_id])

    # ---- a step ----
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
        decode_slots = self._decode(decode_rows)
        new_reqs: list[NewReq] = []
        chunks = self._prefill(self._prompt_budget(len(decode_rows)), new_reqs)
        if not len(decode_rows) and not chunks:
            self._check_progress()
            return None
        plan = StepPlan(
            step_id=self.num_steps,
            released_rows=pack_int32(self._released_rows),
            new_reqs=new_reqs,
            decode_rows=pack_int32(decode_rows),
            prefill_rows=pack_int32([chunk.req.row for chunk in chunks]),
            prefill_starts=pack_int32([chunk.start for chunk in chunks]),
            prefill_lens=pack_int32([len(chunk.slots) for chunk in chunks]),
            out_slots=pack_int32(np.concatenate([decode_slots, *(chunk.slots for chunk in chunks)])),
        )
        self._expect(PlannedStep.note(plan, self._batch, decode_rows, chunks, self._clock()))
        self._released_rows.clear()
        self.num_steps += 1
        return plan

    def _give_back_fully_planned(self) -> None:
        for req in self._fully_planned:
            if req.node is not None:
                self._give_back_slots(req, req.node)
        self._fully_planned.clear()

    def _decode(self, rows: RowArray) -> SlotArray:
        self._cache.make_room(len(rows))
        slots = self._slots.extend(self._batch.last_slots[rows])
        self._batch.append(rows, slots)
        return slots

    def _prompt_budget(self, num_decode: int) -> int:
        budget = self._limits.prefill_tokens(num_decode)
        if self._limits.max_itl_s and num_decode:
            return min(budget, self._step_times.prompt_tokens())
        return budget

    def _prefill(self, budget: int, new_reqs: list[NewReq]) -> list[Chunk]:
        """Spend the step's prompt tokens in order of admission, admitting while some are left."""
        chunks: list[Chunk] = []
        while budget > 0:
            req = self._prefilling or self._admit_next(budget, new_reqs)
            chunk = req and self._cut_chunk(req, budget)
            if not chunk:
                break
            budget -= len(chunk.slots)
            chunks.append(chunk)
        return chunks

    def _expect(self, step: PlannedStep) -> None:
        """Await a step's result; who does not end with it goes on to decode."""
        self._planned.append(step)
        self._fully_planned = [self._batch.req_at(row) for row in step.rows[step.is_last].tolist()]
        self._batch.decode_rows = step.rows[~step.is_last]

    def _check_progress(self) -> None:
        if len(self._queue) and not self._planned:
            raise InvariantError(
                f"nothing runs, {self._cache.num_available} of {self._slots.num_slots} slots and "
                f"{len(self._batch.reqs) - len(self._batch)} rows are free, yet {len(self._queue)} requests wait"
            )

    # ---- admission ----
    def _admit_next(self, budget: int, new_reqs: list[NewReq]) -> Req | None:
        if self._batch.is_full:
            return None
        for req in self._queue.candidates():
            match = self._cache.match(req.ids, req.cache_salt, self.num_steps)
            if match.pending - match.length >= _MIN_PENDING:
                continue  # it shares them if it joins one step later
            claim = self._claim(req, len(req.ids) - match.length, budget)
            if self._admission.fits(claim, match.shares()):
                new_reqs.append(self._admit(req, claim, match))
                return req
        return None

    def _claim(self, req: Req, extend_len: int, budget: int) -> Claim:
        """Tell what a candidate will hold if its prompt takes as many steps as it can need.

        While the prompt goes in, ``_chunk_len`` keeps it below this line.
        """
        later_steps = -(-max(0, extend_len - budget) // self._limits.least_prefill_tokens)
        return Claim(
            slots=extend_len,
            prompt_step=self.num_steps + later_steps,
            num_produced=req.num_produced,
            max_new_tokens=req.max_new_tokens,
            ignores_eos=req.sampling.ignore_eos,
        )

    def _admit(self, req: Req, claim: Claim, match: Match) -> NewReq:
        self._queue.admit(req)
        self._batch.add(req)
        self._admission.add(req.row, claim)
        node = req.node = self._cache.lock(match, req.row)
        req.matched_len = match.length
        if req.cached_len < 0:
            req.cached_len = match.length
        cached_slots = node.prefix_slots()
        if len(cached_slots):
            self._batch.extend_prompt(req, cached_slots)
        self._prefilling = req
        return NewReq(req.row, pack_int32(req.ids), req.prompt_len, pack_int32(cached_slots), req.sampling)

    # ---- prompts ----
    def _cut_chunk(self, req: Req, budget: int) -> Chunk | None:
        start = int(self._batch.seq_lens[req.row])
        chunk_len = min(self._chunk_len(req, len(req.ids) - start, budget), self._cache.num_available)
        if not chunk_len:
            return None
        self._cache.make_room(chunk_len)
        room = req.max_slots - start - chunk_len
        chunk = Chunk(req, start, self._slots.allocate(chunk_len, room, after=int(self._batch.last_slots[req.row])))
        self._batch.extend_prompt(req, chunk.slots)
        self._share(chunk)
        if chunk.ends_prompt:
            self._prefilling = None
        return chunk

    def _chunk_len(self, req: Req, rest: int, budget: int) -> int:
        """Choose how much of a prompt the step takes, keeping what the request holds to what it claims.

        A prompt that gets ahead of its promise may end early if the pool has room for that; if not, one token is left
        for each step up to the promised one.
        """
        early_steps = self._admission.claim_of(req.row).prompt_step - self.num_steps
        if early_steps <= 0 or (rest <= budget and self._may_end_prompt_now(req)):
            return min(rest, budget)
        return min(rest - early_steps, budget)

    def _may_end_prompt_now(self, req: Req) -> bool:
        claim = self._admission.claim_of(req.row)
        self._change_claim(req, replace(claim, prompt_step=self.num_steps))
        if self._admission.keeps_promise():
            return True
        self._change_claim(req, claim)
        return False

    def _change_claim(self, req: Req, claim: Claim) -> None:
        self._admission.change(req.row, claim)
        if req.node is not None:
            self._cache.settle(req.node)

    def _share(self, chunk: Chunk) -> None:
        """Let others share a chunk while the request runs, unless what comes before it is the request's own."""
        req = chunk.req
        if req.node is not None and req.node.end == chunk.start:
            req.node = self._cache.grow(req.node, chunk.ids, chunk.slots, req.row, self.num_steps)

    # ---- pauses ----
    def _pause_until_all_can_decode(self) -> None:
        """Make the youngest wait until there is a slot for each of the others. The oldest is never paused."""
        while self._cache.num_available < len(self._batch.decode_rows):
            holding = [req for req in self._batch.reqs if req is not None and req.node is not None]
            if len(holding) < 2:
                raise InvariantError(f"one request alone overflows {self._slots.num_slots} slots")
            self._pause(max(holding, key=lambda req: req.rank))

    def _pause(self, req: Req) -> None:
        """Put a request back into the queue, with the ids known so far.

        The token in flight is forgotten: its noise depends on its position alone, so it is sampled again.
        """
        num_known = max(len(req.ids), int(self._batch.seq_lens[req.row]))
        req.ids = self._batch.ids[req.row, :num_known].copy()
        self._leave_batch(req)
        self._queue.put_back(req)
        self.num_pauses += 1

    # ---- results ----
    def apply(self, result: StepResult) -> None:
        """Take in what a step sampled: send the tokens on, end the requests that have ended.

        Raises:
            InvariantError: It is not the result of the oldest step planned.
        """
        step = self._planned.popleft()
        token_ids = unpack_int32(result.token_ids)
        if result.step_id != step.step_id or len(token_ids) != len(step.rows):
            raise InvariantError(
                f"step {step.step_id} samples {len(step.rows)} tokens, "
                f"the result is of step {result.step_id} with {len(token_ids)}"
            )
        self._observe_time(step)
        runs = self._batch.stays[step.rows] == step.stays
        finish = self._finish_codes(step, token_ids, runs)
        good = runs & (token_ids >= 0)
        if good.any():
            self._batch.ids[step.rows[good], step.positions[good]] = token_ids[good]
            cached_lens = step.cached_lens[good] if len(step.cached_lens) else NO_LENS
            logprobs = unpack_float32(result.logprobs)
            self._send_tokens(step.req_ids[good], token_ids[good], logprobs[good], finish[good], cached_lens)
        for row in step.rows[runs & (token_ids < 0)].tolist():
            self._fail(self._batch.req_at(row))
        for index in np.flatnonzero(good & (finish != FinishCode.NONE)).tolist():
            req = self._batch.req_at(int(step.rows[index]))
            output_len = int(step.positions[index]) + 1 - req.prompt_len
            self._admission.observe_end(req.row, output_len, is_natural=finish[index] == FinishCode.STOP)
            self._end(req)

    def _observe_time(self, step: PlannedStep) -> None:
        now = self._clock()
        self._step_times.observe(step.num_prompt_tokens, now - max(step.planned_at, self._last_result_at))
        self._last_result_at = now

    def _finish_codes(self, step: PlannedStep, token_ids: IdArray, runs: BoolArray) -> FinishArray:
        """Tell how each sampled token ends its request: an end-of-sequence id as the last token is a stop."""
        batch = self._batch
        stops = (token_ids[:, None] == self._eos_ids).any(axis=1) & ~batch.ignores_eos[step.rows]
        for index in np.flatnonzero(batch.has_stop_ids[step.rows] & runs).tolist():
            stop_ids = batch.req_at(int(step.rows[index])).sampling.stop_token_ids
            stops[index] |= int(token_ids[index]) in stop_ids
        finish = np.where(step.is_last, np.uint8(FinishCode.LENGTH), np.uint8(FinishCode.NONE))
        finish[stops] = FinishCode.STOP
        return finish

    def _send_tokens(
        self,
        req_ids: npt.NDArray[np.int64],
        token_ids: IdArray,
        logprobs: npt.NDArray[np.float32],
        finish: FinishArray,
        cached_lens: IdArray = NO_LENS,
    ) -> None:
        self._send(
            TokensMsg(
                pack_int64(req_ids),
                pack_int32(token_ids),
                pack_float32(logprobs),
                finish.tobytes(),
                pack_int32(cached_lens),
            )
        )

    # ---- the end of a request ----
    def _fail(self, req: Req) -> None:
        """End a request whose logits were not finite; nobody shall read what it has written."""
        self._cache.discard(req.ids, req.cache_salt, req.matched_len)
        error = ErrorInfo(500, "not_finite", "The model's output for this request was not finite.")
        self._send(FailMsg(req.req_id, error))
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
        if req.node is not None:
            self._give_back_slots(req, req.node, keeps=keeps)
        if req is self._prefilling:
            self._prefilling = None
        self._released_rows.append(req.row)
        self._batch.remove(req)

    def _give_back_slots(self, req: Req, node: Node, *, keeps: bool = True) -> None:
        """Let the prefix cache have what a request has computed, but for its last token.

        Whether that one's logits are finite is not known yet.
        """
        own_slots = self._batch.own_slots(req, node.end)
        num_kept = max(0, len(own_slots) - 1) if keeps else 0
        self._admission.remove(req.row)
        if num_kept:
            ids = self._batch.ids[req.row, node.end : node.end + num_kept]
            self._cache.insert(node, ids, own_slots[:num_kept])
        self._slots.free(own_slots[num_kept:])
        self._cache.unlock(node, req.row)
        req.node = None
