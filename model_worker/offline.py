"""Prompts through an engine without a router: for measurements and checks. One step at a time, all requests at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lightserve.ipc.messages import NewReq, StepPlan, pack_int32, unpack_float32, unpack_int32
from lightserve.model_worker.engine import Engine, Runner
from lightserve.sampling_params import SamplingParams


@dataclass
class OfflineReq:
    """One prompt and what became of it.

    Attributes:
        prompt_ids: At least one.
        sampling: ``max_new_tokens`` alone ends it.
        req_row: Its row.
        seq_len: Tokens placed in the cache so far.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    req_row: int
    seq_len: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def is_prefilled(self) -> bool:
        """All of the prompt is in the cache."""
        return self.seq_len >= len(self.prompt_ids)

    @property
    def is_done(self) -> bool:
        """It has all its tokens."""
        return len(self.output_ids) == self.sampling.max_new_tokens


class OfflineBatch:
    """Plans steps for a fixed set of prompts until all are done.

    Args:
        engine: With all rows free; they are released at the end.
        slots: Slots to use, in the order in which tokens come.
        chunked_prefill_size: Most prompt tokens of one step.
    """

    def __init__(
        self, engine: Engine[Runner], slots: npt.NDArray[np.int32], *, chunked_prefill_size: int = 512
    ) -> None:
        self._engine = engine
        self._free_slots = slots
        self._chunked_prefill_size = chunked_prefill_size
        self._step_id = 0

    def run(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[OfflineReq]:
        """Generate for every prompt."""
        reqs = [OfflineReq(*pair, req_row=row) for row, pair in enumerate(zip(prompts, sampling, strict=True))]
        new_reqs = [_new_req(req) for req in reqs]
        while running := [req for req in reqs if not req.is_done]:
            self._step(running, new_reqs)
            new_reqs = []
        self._send(released_rows=[req.req_row for req in reqs])
        return reqs

    def _step(self, running: list[OfflineReq], new_reqs: list[NewReq]) -> None:
        decoding = [req for req in running if req.is_prefilled]
        chunks = self._chunks([req for req in running if not req.is_prefilled])
        raw = self._send(
            new_reqs=new_reqs,
            decode_rows=[req.req_row for req in decoding],
            prefill_rows=[req.req_row for req, _ in chunks],
            prefill_starts=[req.seq_len for req, _ in chunks],
            prefill_lens=[num_tokens for _, num_tokens in chunks],
        )
        for req, num_tokens in [*((req, 1) for req in decoding), *chunks]:
            req.seq_len += num_tokens
        sampled = [*decoding, *(req for req, _ in chunks if req.is_prefilled)]
        for req, token_id, logprob in zip(sampled, *raw, strict=True):
            req.output_ids.append(token_id)
            req.logprobs.append(logprob)

    def _chunks(self, waiting: list[OfflineReq]) -> list[tuple[OfflineReq, int]]:
        chunks, room = [], self._chunked_prefill_size
        for req in waiting:
            num_tokens = min(len(req.prompt_ids) - req.seq_len, room)
            if num_tokens:
                chunks.append((req, num_tokens))
            room -= num_tokens
        return chunks

    def _send(
        self,
        *,
        released_rows: Sequence[int] = (),
        new_reqs: Sequence[NewReq] = (),
        decode_rows: Sequence[int] = (),
        prefill_rows: Sequence[int] = (),
        prefill_starts: Sequence[int] = (),
        prefill_lens: Sequence[int] = (),
    ) -> tuple[list[int], list[float]]:
        num_tokens = len(decode_rows) + sum(prefill_lens)
        out_slots, self._free_slots = np.split(self._free_slots, [num_tokens])
        plan = StepPlan(
            step_id=self._step_id,
            released_rows=pack_int32(released_rows),
            new_reqs=list(new_reqs),
            decode_rows=pack_int32(decode_rows),
            prefill_rows=pack_int32(prefill_rows),
            prefill_starts=pack_int32(prefill_starts),
            prefill_lens=pack_int32(prefill_lens),
            out_slots=pack_int32(out_slots),
        )
        self._step_id += 1
        result = self._engine.step(plan).result()
        return unpack_int32(result.token_ids).tolist(), unpack_float32(result.logprobs).tolist()


def _new_req(req: OfflineReq) -> NewReq:
    return NewReq(req.req_row, pack_int32(req.prompt_ids), len(req.prompt_ids), b"", req.sampling)
