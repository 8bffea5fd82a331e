"""What the router remembers of a step between its plan and its result."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightserve.ipc.messages import StepPlan
from lightserve.router.arrays import BoolArray, IdArray, IntArray, RowArray, SlotArray
from lightserve.router.batch import Batch
from lightserve.router.request import Req

NO_LENS: IdArray = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of a prompt that a step prefills.

    Attributes:
        req: Whose.
        start: Position of its first token.
        slots: [chunk_len] int32, where its K and V go.
    """

    req: Req
    start: int
    slots: SlotArray

    @property
    def ids(self) -> IdArray:
        """Its ids: a view, [chunk_len] int32."""
        return self.req.ids[self.start : self.start + len(self.slots)]

    @property
    def ends_prompt(self) -> bool:
        """Whether a token is sampled after it."""
        return self.start + len(self.slots) == len(self.req.ids)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Whose tokens a step samples.

    Attributes:
        step_id: The plan's.
        planned_at: When, in seconds.
        num_prompt_tokens: Tokens of its chunks.
        rows: [num_sampled] int32, in sampling order.
        req_ids: [num_sampled] int64.
        stays: [num_sampled] int64; when the result comes a row may be another's, or the same request's anew.
        positions: [num_sampled] int32, where in its sequence the sampled token stands.
        is_last: [num_sampled] bool, the token is its request's max_new_tokens-th.
        cached_lens: [num_sampled] int32, for requests whose first token this is: prompt ids that the cache had; empty
            if all are 0.
    """

    step_id: int
    planned_at: float
    num_prompt_tokens: int
    rows: RowArray
    req_ids: IntArray
    stays: IntArray
    positions: IdArray
    is_last: BoolArray
    cached_lens: IdArray

    @classmethod
    def note(
        cls, plan: StepPlan, batch: Batch, decode_rows: RowArray, chunks: Sequence[Chunk], planned_at: float
    ) -> "PlannedStep":
        """Note what the result of a plan will be about, the batch being as the plan leaves it."""
        ending = [chunk.req for chunk in chunks if chunk.ends_prompt]
        rows = decode_rows
        if ending:
            rows = np.concatenate([decode_rows, np.array([req.row for req in ending], dtype=np.int32)])
        positions = batch.seq_lens[rows]
        return cls(
            step_id=plan.step_id,
            planned_at=planned_at,
            num_prompt_tokens=sum(len(chunk.slots) for chunk in chunks),
            rows=rows,
            req_ids=batch.req_ids[rows],
            stays=batch.stays[rows],
            positions=positions,
            is_last=positions == batch.final_lens[rows],
            cached_lens=_cached_lens(len(decode_rows), ending),
        )


def _cached_lens(num_decode: int, ending: Sequence[Req]) -> IdArray:
    found = [0 if req.num_produced else req.cached_len for req in ending]
    return np.array([0] * num_decode + found, dtype=np.int32) if any(found) else NO_LENS
