"""One rank's engine: it applies plans to the rows, runs the model, and samples."""

from dataclasses import dataclass

import torch

from lightserve.ipc.messages import NewReq, StepPlan, StepResult, pack_float32, pack_int32, unpack_int32
from lightserve.model_worker.forward_batch import ForwardBatch, HostBatch
from lightserve.model_worker.kv_cache import KVCache
from lightserve.model_worker.models.llama import LlamaModel
from lightserve.model_worker.req_rows import ReqRows
from lightserve.model_worker.sampler import Sampler


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled, perhaps still being computed.

    Attributes:
        token_ids: [num_sampled] int32.
        logprobs: [num_sampled] float32.
    """

    step_id: int
    token_ids: torch.Tensor
    logprobs: torch.Tensor

    def result(self) -> StepResult:
        """Wait for the step and fetch what it sampled."""
        token_ids, logprobs = self.token_ids.cpu().numpy(), self.logprobs.cpu().numpy()
        return StepResult(self.step_id, pack_int32(token_ids), pack_float32(logprobs))


class Engine:
    """Runs steps in the order of their plans.

    A step that runs out of memory is run again in two halves, and so on down to single tokens: writes to the cache are
    the same whatever the cut, and ids are only committed when a piece is done. So nobody's request fails; only a step
    of one token that does not fit ends the process. With several ranks any such failure ends the process, since the
    others wait inside a collective operation.

    Args:
        model: This rank's.
        kv_cache: This rank's.
        rows: State of the running requests.
        sampler: Their sampling parameters.
        may_split: Whether a step may be run in pieces (one rank only).
    """

    def __init__(
        self, model: LlamaModel, kv_cache: KVCache, rows: ReqRows, sampler: Sampler, *, may_split: bool = True
    ) -> None:
        self.model = model
        self._kv_cache = kv_cache
        self._rows = rows
        self._sampler = sampler
        self._may_split = may_split
        self.num_steps = 0
        self.num_split_steps = 0

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepOutput:
        """Launch one step.

        Raises:
            InvariantError: The plan contradicts the state.
        """
        self._rows.release(unpack_int32(plan.released_rows))
        self._enter(plan.new_reqs)
        batch = HostBatch.of(plan, self._rows)
        token_ids, logprobs = self._run(batch) if batch.num_tokens else _nothing_sampled()
        self._rows.seq_lens[batch.req_rows] = batch.seq_lens
        self.num_steps += 1
        return StepOutput(plan.step_id, token_ids, logprobs)

    def _enter(self, new_reqs: list[NewReq]) -> None:
        for req in new_reqs:
            self._rows.enter(req)
        self._sampler.enter(new_reqs)

    def _run(self, host: HostBatch) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self._run_whole(host)
        except torch.OutOfMemoryError:
            if not self._may_split or host.num_tokens == 1:
                raise
        self.num_split_steps += 1
        first, second = (self._run(half) for half in host.halves())
        return torch.cat((first[0], second[0])), torch.cat((first[1], second[1]))

    def _run_whole(self, host: HostBatch) -> tuple[torch.Tensor, torch.Tensor]:
        batch = ForwardBatch.of(host, self._rows)
        hidden = self.model.forward(batch, self._kv_cache)
        if not host.is_sampled.any():
            return _nothing_sampled()
        token_ids, logprobs = self._sampler.sample(self.model.logits(hidden), batch, self._rows)
        self._rows.next_token[batch.sampled_rows] = token_ids
        return token_ids, logprobs


def _nothing_sampled() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(0, dtype=torch.int32), torch.empty(0)
