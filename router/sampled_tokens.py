"""A step's result, read against what was planned: whose tokens count, who has failed, who ends and how."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightserve.errors import InvariantError
from lightserve.ipc.messages import (
    FinishCode,
    Float32s,
    StepResult,
    TokensMsg,
    pack_float32,
    pack_int32,
    pack_int64,
    unpack_float32,
    unpack_int32,
)
from lightserve.router.arrays import BoolArray, FinishArray, IdArray
from lightserve.router.batch import Batch
from lightserve.router.planned_step import NO_LENS, PlannedStep

_LENGTH, _STOP = np.uint8(FinishCode.LENGTH), np.uint8(FinishCode.STOP)  # none is 0


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step has sampled.

    Attributes:
        step: The step.
        token_ids: [num_sampled] int32, -1 where a row's logits were not finite.
        raw_logprobs: [num_sampled] float32, as it came.
        counts: [num_sampled] bool, a token of a request that still runs.
        fails: [num_sampled] bool, a request that still runs, but whose logits were not finite.
        finish: [num_sampled] uint8, the ``FinishCode`` of each token that counts.
    """

    step: PlannedStep
    token_ids: IdArray
    raw_logprobs: Float32s
    counts: BoolArray
    fails: BoolArray
    finish: FinishArray

    @classmethod
    def read(cls, result: StepResult, step: PlannedStep, batch: Batch, eos_ids: IdArray) -> "SampledTokens":
        """Read a result.

        Raises:
            InvariantError: It is another step's.
        """
        token_ids = unpack_int32(result.token_ids)
        if result.step_id != step.step_id or len(token_ids) != len(step.rows):
            raise InvariantError(
                f"step {step.step_id} samples {len(step.rows)} tokens, "
                f"the result is of step {result.step_id} with {len(token_ids)}"
            )
        runs = batch.stays[step.rows] == step.stays
        finish = _finish_codes(step, token_ids, runs, batch, eos_ids)
        return cls(step, token_ids, result.logprobs, runs & (token_ids >= 0), runs & (token_ids < 0), finish)

    def endings(self) -> Iterator[tuple[int, int, FinishCode]]:
        """Yield (row, position of the last token, how) of each request that ends."""
        if not self.finish.any():
            return
        for index in np.flatnonzero(self.counts & (self.finish != FinishCode.NONE)).tolist():
            yield int(self.step.rows[index]), int(self.step.positions[index]), FinishCode(self.finish[index])

    def message(self) -> TokensMsg:
        """Tell the detokenizer of the tokens that count."""
        counts, step = self.counts, self.step
        return TokensMsg(
            pack_int64(step.req_ids[counts]),
            pack_int32(self.token_ids[counts]),
            pack_float32(unpack_float32(self.raw_logprobs)[counts]),
            self.finish[counts].tobytes(),
            pack_int32(step.cached_lens[counts] if len(step.cached_lens) else NO_LENS),
        )


def _finish_codes(
    step: PlannedStep, token_ids: IdArray, runs: BoolArray, batch: Batch, eos_ids: IdArray
) -> FinishArray:
    """Tell how each sampled token ends its request: an end-of-sequence id as the last token is a stop."""
    stops = np.zeros(len(token_ids), dtype=np.bool_)
    for eos_id in eos_ids.tolist():
        stops |= token_ids == eos_id
    stops &= ~batch.ignores_eos[step.rows]
    has_stop_ids = batch.has_stop_ids[step.rows]
    if has_stop_ids.any():
        for index in np.flatnonzero(has_stop_ids & runs).tolist():
            stop_ids = batch.req_at(int(step.rows[index])).sampling.stop_token_ids
            stops[index] |= int(token_ids[index]) in stop_ids
    finish: FinishArray = step.is_last * _LENGTH
    finish[stops] = _STOP
    return finish


def aborted(req_ids: Sequence[int]) -> TokensMsg:
    """Tell the detokenizer of requests that end without a token, as their clients have left."""
    num_reqs = len(req_ids)
    return TokensMsg(
        pack_int64(req_ids),
        pack_int32([-1] * num_reqs),
        pack_float32([0.0] * num_reqs),
        bytes([FinishCode.ABORT]) * num_reqs,
    )
