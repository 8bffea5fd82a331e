"""Decides what every step runs: which requests join, which prompts are prefilled, who decodes, who has ended.

One step is planned ahead of the worker: when step n is planned, the results of step n - 2 and before are known. A
request that ends by length is known in advance and wastes nothing; one that ends by an end-of-sequence id runs one row
in vain, whose result is ignored. The worker runs steps in order, so slots given back when a step's plan is made or a
result arrives may be written by any later plan.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

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
from lightserve.router.admission import Admission, Charge
from lightserve.router.batch import Batch, RowArray
from lightserve.router.limits import Limits
from lightserve.router.request import IdArray, Req
from lightserve.router.slots import SlotAllocator, SlotArray
from lightserve.router.waiting_queue import WaitingQueue

FinishArray: TypeAlias = npt.NDArray[np.uint8]

MAX_PASSES = 64
LOOKAHEAD = 16


@dataclass(frozen=True, slots=True)
class _Chunk:
    req: Req
    start: int
    slots: SlotArray

    @property
    def end(self) -> int:
        return self.start + len(self.slots)

    @property
    def ends_prompt(self) -> bool:
        return self.end == self.req.prompt_len


@dataclass(frozen=True, slots=True)
class _PlannedStep:
    """Whose tokens a step samples: what is needed to read its result.

    Attributes:
        rows: [num_sampled] int32, in sampling order.
        req_ids: [num_sampled] int64; a row may have another owner when the result comes.
        is_last: [num_sampled] bool, the token is its request's max_new_tokens-th.
    """

    step_id: int
    rows: RowArray
    req_ids: npt.NDArray[np.int64]
    is_last: npt.NDArray[np.bool_]


class Scheduler:
    """Plans steps and applies their results.

    Args:
        limits: What it must keep to.
        send: Takes messages to the detokenizer.
    """

    def __init__(self, limits: Limits, send: Callable[[DetokenizerInbox], None]) -> None:
        self._limits = limits
        self._send = send
        self._eos_ids = np.asarray(limits.eos_token_ids, dtype=np.int32)
        self._reqs: dict[int, Req] = {}
        self._queue = WaitingQueue(limits.max_queued_reqs, max_passes=MAX_PASSES, lookahead=LOOKAHEAD)
        self._admission = Admission(limits.max_total_token_num, limits.running_max_req_size)
        self._slots = SlotAllocator(limits.max_total_token_num)
        self._batch = Batch(limits.running_max_req_size, min(limits.max_req_total_len, limits.max_total_token_num))
        self._num_steps = 0
        self._planned: deque[_PlannedStep] = deque()
        self._prefilling: Req | None = None  # its prompt is in part planned; there is never a second one
        self._fully_planned: list[Req] = []  # their last step was the last one planned
        self._released_rows: list[int] = []  # for the next plan to tell

    @property
    def is_idle(self) -> bool:
        """Whether no request is known and no result is awaited."""
        return not self._reqs and not self._planned

    # ---- requests come and go ----
    def add(self, message: GenerateMsg) -> None:
        """Queue a request, or refuse it with a ``FailMsg``.

        Raises:
            InvariantError: Its id is in use.
        """
        if message.req_id in self._reqs:
            raise InvariantError(f"request id {message.req_id} is in use")
        req = Req.from_message(message)
        refusal = self._refusal(req)
        if refusal is not None:
            self._send(FailMsg(req.req_id, refusal))
            return
        self._reqs[req.req_id] = req
        self._queue.add(req)
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
            self._end(req)

    def stop(self, req_ids: Iterable[int]) -> None:
        """End requests whose clients have already been told; ids that are not known are no error."""
        for req_id in req_ids:
            if req_id in self._reqs:
                self._end(self._reqs[req_id])

    def _refusal(self, req: Req) -> ErrorInfo | None:
        limits = self._limits
        total_len = req.prompt_len + req.sampling.max_new_tokens
        asked = f"prompt ({req.prompt_len}) and max_new_tokens ({req.sampling.max_new_tokens})"
        if total_len > limits.max_req_total_len:
            message = f"{asked} exceed max_req_total_len ({limits.max_req_total_len})"
            return ErrorInfo(400, "context_length_exceeded", message)
        if req.max_slots > limits.max_total_token_num:
            message = f"{asked} can never fit max_total_token_num ({limits.max_total_token_num})"
            return ErrorInfo(400, "context_length_exceeded", message)
        if self._queue.is_full:
            return ErrorInfo(429, "queue_full", f"{limits.max_queued_reqs} requests are waiting already")
        return None

    # ---- a step ----
    def plan(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to run.

        Raises:
            InvariantError: A request waits for ever.
        """
        self._give_back_fully_planned()
        decode_rows = self._batch.decode_rows
        decode_slots = self._decode(decode_rows)
        new_reqs: list[NewReq] = []
        chunks = self._prefill(self._limits.prefill_tokens(len(decode_rows)), new_reqs)
        if not len(decode_rows) and not chunks:
            self._check_progress()
            return None
        self._expect(decode_rows, chunks)
        plan = StepPlan(
            step_id=self._num_steps,
            released_rows=pack_int32(self._released_rows),
            new_reqs=new_reqs,
            decode_rows=pack_int32(decode_rows),
            prefill_rows=pack_int32([chunk.req.row for chunk in chunks]),
            prefill_starts=pack_int32([chunk.start for chunk in chunks]),
            prefill_lens=pack_int32([len(chunk.slots) for chunk in chunks]),
            out_slots=pack_int32(np.concatenate([decode_slots, *(chunk.slots for chunk in chunks)])),
        )
        self._released_rows.clear()
        self._num_steps += 1
        return plan

    def _give_back_fully_planned(self) -> None:
        for req in self._fully_planned:
            if req.holds_slots:
                self._give_back_slots(req)
        self._fully_planned.clear()

    def _decode(self, rows: RowArray) -> SlotArray:
        slots = self._slots.extend(self._batch.last_slots[rows])
        self._batch.append(rows, slots)
        return slots

    def _prefill(self, budget: int, new_reqs: list[NewReq]) -> list[_Chunk]:
        """Spend the step's prompt tokens in order of admission, admitting while some are left."""
        chunks = []
        while budget > 0:
            req = self._prefilling or self._admit_next(budget, new_reqs)
            if req is None:
                break
            chunk = self._cut_chunk(req, budget)
            if chunk is None:
                break
            budget -= len(chunk.slots)
            chunks.append(chunk)
        return chunks

    def _admit_next(self, budget: int, new_reqs: list[NewReq]) -> Req | None:
        if self._batch.is_full:
            return None
        for req in self._queue.candidates():
            charge = self._charge(req, budget)
            if self._admission.fits(charge):
                self._admit(req, charge)
                new_reqs.append(NewReq(req.row, pack_int32(req.prompt_ids), req.prompt_len, b"", req.sampling))
                return req
        return None

    def _charge(self, req: Req, budget: int) -> Charge:
        """Tell what a candidate will hold if its prompt takes as many steps as it can need.

        While the prompt goes in, ``_chunk_len`` keeps it below this line.
        """
        later_steps = -(-max(0, req.prompt_len - budget) // self._limits.least_prefill_tokens)
        return _charge_from(req, self._num_steps + later_steps)

    def _admit(self, req: Req, charge: Charge) -> None:
        self._queue.admit(req)
        self._batch.add(req)
        self._admission.add(req.row, charge)
        req.holds_slots = True
        self._prefilling = req

    def _cut_chunk(self, req: Req, budget: int) -> _Chunk | None:
        start = int(self._batch.seq_lens[req.row])
        chunk_len = self._chunk_len(req, start, budget)
        if not chunk_len:
            return None
        room = req.max_slots - start - chunk_len
        slots = self._slots.allocate(chunk_len, room, after=int(self._batch.last_slots[req.row]))
        self._batch.extend_prompt(req, slots)
        chunk = _Chunk(req, start, slots)
        if chunk.ends_prompt:
            self._prefilling = None
        return chunk

    def _chunk_len(self, req: Req, start: int, budget: int) -> int:
        """Choose how much of a prompt the step takes, keeping what the request holds to what it is charged.

        A prompt that gets ahead of its promise may end early if the pool has room for that; if not, one token is left
        for each step up to the promised one.
        """
        rest = req.prompt_len - start
        early_steps = self._admission.charge_of(req.row).end - req.sampling.max_new_tokens - self._num_steps
        if not early_steps or (rest <= budget and self._end_prompt_early(req)):
            return min(rest, budget)
        return min(rest - early_steps, budget)

    def _end_prompt_early(self, req: Req) -> bool:
        return self._admission.change_if_it_fits(req.row, _charge_from(req, self._num_steps))

    def _expect(self, decode_rows: RowArray, chunks: list[_Chunk]) -> None:
        """Note whose tokens the step samples, and who goes on to decode."""
        batch = self._batch
        ending = np.array([chunk.req.row for chunk in chunks if chunk.ends_prompt], dtype=np.int32)
        rows = np.concatenate([decode_rows, ending])
        is_last = batch.seq_lens[rows] == batch.final_lens[rows]
        self._planned.append(_PlannedStep(self._num_steps, rows, batch.req_ids[rows], is_last))
        self._fully_planned = [batch.req_at(row) for row in rows[is_last].tolist()]
        batch.decode_rows = rows[~is_last]

    def _check_progress(self) -> None:
        if len(self._queue) and not self._planned:
            raise InvariantError(
                f"nothing runs, {self._slots.num_free} of {self._slots.num_slots} slots and "
                f"{len(self._batch.reqs) - len(self._batch)} rows are free, yet {len(self._queue)} requests wait"
            )

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
        runs = self._batch.req_ids[step.rows] == step.req_ids
        finish = self._finish_codes(step, token_ids, runs)
        good = runs & (token_ids >= 0)
        if good.any():
            logprobs = unpack_float32(result.logprobs)
            self._send_tokens(step.req_ids[good], token_ids[good], logprobs[good], finish[good])
        self._fail(step.rows[runs & (token_ids < 0)])
        for row in step.rows[good & (finish != FinishCode.NONE)].tolist():
            self._end(self._batch.req_at(row))

    def _finish_codes(self, step: _PlannedStep, token_ids: IdArray, runs: npt.NDArray[np.bool_]) -> FinishArray:
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
    ) -> None:
        self._send(TokensMsg(pack_int64(req_ids), pack_int32(token_ids), pack_float32(logprobs), finish.tobytes()))

    def _fail(self, rows: RowArray) -> None:
        for row in rows.tolist():
            req = self._batch.req_at(row)
            error = ErrorInfo(500, "not_finite", "the model's output for this request was not finite")
            self._send(FailMsg(req.req_id, error))
            self._end(req)

    # ---- the end of a request ----
    def _end(self, req: Req) -> None:
        """Forget a request, in whatever state it is."""
        del self._reqs[req.req_id]
        if not req.is_running:
            self._queue.remove(req)
            return
        if req.holds_slots:
            self._give_back_slots(req)
        if req is self._prefilling:
            self._prefilling = None
        self._released_rows.append(req.row)
        self._batch.remove(req)

    def _give_back_slots(self, req: Req) -> None:
        self._slots.free(self._batch.held_slots(req))
        self._admission.remove(req.row)
        req.holds_slots = False

    # ---- load ----
    def load(self) -> LoadMsg:
        """Tell how full the server is."""
        promised = self._admission.peak()
        return LoadMsg(
            num_running=len(self._batch),
            num_waiting=len(self._queue),
            used_slots=self._slots.num_used,
            cached_slots=0,
            promised_slots=promised,
            dynamic_slots=promised + self._queue.max_slots,
            max_total_token_num=self._limits.max_total_token_num,
        )


def _charge_from(req: Req, prompt_step: int) -> Charge:
    """Charge a request whose prompt is complete with step ``prompt_step``: after that one it grows by a slot each."""
    return Charge(base=req.prompt_len - 1 - prompt_step, end=prompt_step + req.sampling.max_new_tokens)
