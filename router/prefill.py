"""Which prompts a step takes in: the rest of the one that is going in, then those of requests that join."""

from dataclasses import replace

from lightserve.ipc.messages import NewReq, pack_int32
from lightserve.router.admission import Claim
from lightserve.router.holdings import Holdings
from lightserve.router.limits import Limits
from lightserve.router.planned_step import Chunk
from lightserve.router.prefix_tree import Match
from lightserve.router.request import Req
from lightserve.router.waiting_queue import WaitingQueue

# Prompt ids that are worth waiting one step for, when another request is just computing them: an 8B model on an H200
# takes 23 µs for each, so that from here on 1.5 ms of everybody's time are saved for the step that one request waits.
_MIN_PENDING = 64


class Prefill:
    """Cuts prompts into chunks and admits requests.

    Args:
        limits: What it must keep to.
        queue: Who waits.
        holdings: What those hold who run.
    """

    def __init__(self, limits: Limits, queue: WaitingQueue, holdings: Holdings) -> None:
        self._limits = limits
        self._queue = queue
        self._holdings = holdings
        self._current: Req | None = None  # its prompt is in part planned; there is never a second one
        self._step = 0

    def plan(self, step: int, budget: int) -> tuple[list[Chunk], list[NewReq]]:
        """Spend a step's prompt tokens in order of admission, admitting while some are left.

        Args:
            step: The step that is being planned.
            budget: Its prompt tokens.

        Returns:
            The chunks, and the requests that join.
        """
        self._step = step
        chunks: list[Chunk] = []
        new_reqs: list[NewReq] = []
        while budget > 0:
            req = self._current or self._admit_next(budget, new_reqs)
            chunk = req and self._cut_chunk(req, budget)
            if not chunk:
                break
            budget -= len(chunk.slots)
            chunks.append(chunk)
        return chunks, new_reqs

    def forget(self, req: Req) -> None:
        """Take no more of a prompt in, if it is the one that is going in."""
        if req is self._current:
            self._current = None

    def _admit_next(self, budget: int, new_reqs: list[NewReq]) -> Req | None:
        holdings = self._holdings
        if holdings.batch.is_full:
            return None
        for req in self._queue.candidates():
            match = holdings.cache.match(req.ids, req.cache_salt, self._step)
            if match.pending - match.length >= _MIN_PENDING:
                continue  # it shares them if it joins one step later
            claim = self._claim(req, len(req.ids) - match.length, budget)
            if holdings.admission.fits(claim, match.shares()):
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
            prompt_step=self._step + later_steps,
            num_produced=req.num_produced,
            max_new_tokens=req.max_new_tokens,
            ignores_eos=req.sampling.ignore_eos,
        )

    def _admit(self, req: Req, claim: Claim, match: Match) -> NewReq:
        self._queue.admit(req)
        cached_slots = self._holdings.admit(req, claim, match)
        self._current = req
        return NewReq(req.row, pack_int32(req.ids), req.prompt_len, pack_int32(cached_slots), req.sampling)

    def _cut_chunk(self, req: Req, budget: int) -> Chunk | None:
        rest = len(req.ids) - int(self._holdings.batch.seq_lens[req.row])
        chunk_len = min(self._chunk_len(req, rest, budget), self._holdings.cache.num_available)
        if not chunk_len:
            return None
        chunk = self._holdings.extend_prompt(req, chunk_len, self._step)
        if chunk.ends_prompt:
            self._current = None
        return chunk

    def _chunk_len(self, req: Req, rest: int, budget: int) -> int:
        """Choose how much of a prompt the step takes, keeping what the request holds to what it claims.

        A prompt that gets ahead of its promise may end early if the pool has room for that; if not, one token is left
        for each step up to the promised one.
        """
        early_steps = self._holdings.admission.claim_of(req.row).prompt_step - self._step
        if early_steps <= 0 or (rest <= budget and self._may_end_prompt_now(req)):
            return min(rest, budget)
        return min(rest - early_steps, budget)

    def _may_end_prompt_now(self, req: Req) -> bool:
        claim = self._holdings.admission.claim_of(req.row)
        self._holdings.change_claim(req, replace(claim, prompt_step=self._step))
        if self._holdings.admission.keeps_promise():
            return True
        self._holdings.change_claim(req, claim)
        return False
