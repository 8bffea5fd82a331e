"""A model worker that computes nothing and takes its time: how long a step lasts is a formula."""

from pathlib import Path
from typing import Annotated, Protocol, TypeAlias

import msgspec
import numpy as np

from lightserve.ipc.messages import NewReq, StepPlan, StepResult, count_int32, pack_float32, pack_int32, unpack_int32
from lightserve.router.arrays import IdArray, IntArray, RowArray

EOS_ID = 2
OTHER_ID = 5

_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class StepModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a step takes.

    Attributes:
        note: What the numbers stand for.
        launch_s: Every step.
        weights_s: Reading the weights, which hides as much computing.
        token_s: The matrix products of one token.
        context_token_s: A decode row's attention to one earlier token.
        prompt_pair_s: A prompt token's attention to one earlier token.
    """

    note: str
    launch_s: _Seconds
    weights_s: _Seconds
    token_s: _Seconds
    context_token_s: _Seconds
    prompt_pair_s: _Seconds

    @classmethod
    def read(cls, path: Path) -> "StepModel":
        """Read a .json file.

        Raises:
            ValueError: It is no such model, or one whose steps may take no time.
        """
        model = msgspec.json.decode(path.read_bytes(), type=cls)
        if model.duration_s(1, 0, 0.0) <= 0:
            raise ValueError("a step of one token takes no time")
        return model

    def duration_s(self, num_tokens: int, num_context_tokens: int, num_prompt_pairs: float) -> float:
        """Tell how long a step takes."""
        return (
            self.launch_s
            + max(self.weights_s, self.token_s * num_tokens)
            + self.context_token_s * num_context_tokens
            + self.prompt_pair_s * num_prompt_pairs
        )


class Clock(Protocol):
    """Some time or other, in seconds."""

    @property
    def now_s(self) -> float:
        """Tell the time."""

    def wait_until(self, at_s: float) -> None:
        """Return at that time, or at once if it has passed."""


class VirtualClock:
    """The simulation's time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now_s

    def wait_until(self, at_s: float) -> None:
        """Put the time forward."""
        self.now_s = max(self.now_s, at_s)


class AnswerIds(Protocol):
    """Chooses what is sampled."""

    def enter(self, new: NewReq) -> None:
        """Take notice of a request that enters the batch."""

    def choose(self, rows: RowArray, num_ids: IntArray) -> IdArray:
        """Choose an id for each of [n] rows, whose prompt and output will then be ``num_ids`` long, [n]."""


class KnownLengths:
    """Always the same id, until a request has come to its end.

    Args:
        output_lens: [num_requests] where each request really ends; a request's seed is its number.
        num_rows: Rows of the batch.
    """

    def __init__(self, output_lens: IntArray, num_rows: int) -> None:
        self._output_lens = output_lens
        self._final_lens = np.zeros(num_rows, dtype=np.int64)  # num_ids when the end-of-sequence id is sampled

    def enter(self, new: NewReq) -> None:
        """Look up where it ends."""
        self._final_lens[new.req_row] = new.prompt_len + self._output_lens[new.sampling.seed]

    def choose(self, rows: RowArray, num_ids: IntArray) -> IdArray:
        """End who has come to its end."""
        return np.where(num_ids == self._final_lens[rows], EOS_ID, OTHER_ID).astype(np.int32)


class ModelledWorker:
    """Runs plans one behind another, each for its time.

    Args:
        model: How long that is.
        clock: Waits for the time at which a result is there.
        answer_ids: What is sampled.
        num_rows: Rows of the batch.
    """

    def __init__(self, model: StepModel, clock: Clock, answer_ids: AnswerIds, num_rows: int) -> None:
        self._model = model
        self._clock = clock
        self._answer_ids = answer_ids
        self._seq_lens = np.zeros(num_rows, dtype=np.int64)  # positions written
        self._num_ids = np.zeros(num_rows, dtype=np.int64)  # prompt and what has been sampled
        self._free_at_s = 0.0
        self._pending: StepResult | None = None
        self._pending_at_s = 0.0
        self.busy_s = 0.0

    def step(self, plan: StepPlan) -> StepResult | None:
        """Launch a step; return the result of the one before, as soon as it is there."""
        duration_s = self._advance(plan)
        has_waited = self._clock.now_s > self._free_at_s
        self._free_at_s = max(self._free_at_s, self._clock.now_s) + duration_s
        self.busy_s += duration_s
        result = self.flush()
        self._pending, self._pending_at_s = self._sample(plan), self._free_at_s
        return None if result is None else msgspec.structs.replace(result, device_waited=has_waited)

    def flush(self) -> StepResult | None:
        """Return the last result, as soon as it is there."""
        result, self._pending = self._pending, None
        if result is not None:
            self._clock.wait_until(self._pending_at_s)
        return result

    def _advance(self, plan: StepPlan) -> float:
        """Take in a plan; return how long it runs."""
        for new in plan.new_reqs:
            self._seq_lens[new.req_row] = count_int32(new.cached_slots)
            self._num_ids[new.req_row] = count_int32(new.ids)
            self._answer_ids.enter(new)
        decode_rows, prefill_rows = unpack_int32(plan.decode_rows), unpack_int32(plan.prefill_rows)
        self._seq_lens[decode_rows] += 1
        num_context_tokens = int(self._seq_lens[decode_rows].sum())
        lens = unpack_int32(plan.prefill_lens).astype(np.int64)
        num_pairs = float((lens * (unpack_int32(plan.prefill_starts) + lens / 2)).sum())
        self._seq_lens[prefill_rows] += lens
        return self._model.duration_s(len(decode_rows) + int(lens.sum()), num_context_tokens, num_pairs)

    def _sample(self, plan: StepPlan) -> StepResult:
        prefill_rows = unpack_int32(plan.prefill_rows)
        ending = prefill_rows[self._seq_lens[prefill_rows] == self._num_ids[prefill_rows]]
        rows: RowArray = np.concatenate([unpack_int32(plan.decode_rows), ending])
        self._num_ids[rows] += 1
        token_ids = self._answer_ids.choose(rows, self._num_ids[rows])
        return StepResult(plan.step_id, pack_int32(token_ids), pack_float32(np.zeros(len(rows))))
