"""Runs batches on a CPU: as they come, without padding."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch

from lightserve.ipc.messages import NewReq, StepResult, pack_float32, pack_int32
from lightserve.model_worker.cpu.backend import CpuBackend
from lightserve.model_worker.cpu.forward_batch import ForwardBatch
from lightserve.model_worker.cpu.memory import MAX_SAMPLED_AT_ONCE, is_out_of_memory
from lightserve.model_worker.cpu.sampler import Sampler
from lightserve.model_worker.engine import Engine
from lightserve.model_worker.host_batch import HostBatch
from lightserve.model_worker.kv_cache import KVCache
from lightserve.model_worker.models.llama import LlamaModel
from lightserve.model_worker.req_rows import ReqRows

logger = logging.getLogger(__name__)

CpuModel: TypeAlias = LlamaModel[CpuBackend]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled.

    Attributes:
        token_ids: [num_sampled] int32.
        logprobs: [num_sampled] float32.
    """

    step_id: int
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    has_ended: ClassVar[bool] = True

    def result(self) -> StepResult:
        """Pack it."""
        return StepResult(self.step_id, pack_int32(self.token_ids.numpy()), pack_float32(self.logprobs.numpy()))


class CpuRunner:
    """Implements ``Runner``.

    A step that would sample very many rows is run in two halves, one after the other, and so on: the same writes to
    the cache and the same ids in the same order, for less memory. So is a step that runs out of memory all the same,
    down to single tokens: ids are only committed when a piece is done. Nobody's request fails; only a step of one token
    that does not fit ends the process, and with several ranks any, since the others wait inside a collective operation.

    Args:
        model: This rank's.
        kv_cache: This rank's.
        rows: State of the running requests.
        sampler: Their sampling parameters.
    """

    def __init__(self, model: CpuModel, kv_cache: KVCache, rows: ReqRows, sampler: Sampler) -> None:
        self.model = model
        self._kv_cache = kv_cache
        self._rows = rows
        self._sampler = sampler

    def enter(self, new_reqs: Sequence[NewReq]) -> None:
        """Take over the parameters of requests that enter the batch."""
        self._sampler.enter(new_reqs)

    def run(self, step_id: int, batch: HostBatch) -> Sampled:
        """Run a batch of at least one token."""
        return Sampled(step_id, *self._run(batch))

    def _run(self, host: HostBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if len(host.sampled_rows) > MAX_SAMPLED_AT_ONCE:
            return self._run_in_halves(host)
        try:
            return self._run_whole(host)
        except RuntimeError as error:
            if not is_out_of_memory(error) or self.model.world_size > 1 or host.num_tokens == 1:
                raise
        logger.warning("out of memory: a step of %d tokens is run in two halves", host.num_tokens)
        return self._run_in_halves(host)

    def _run_in_halves(self, host: HostBatch) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (self._run(half) for half in host.halves())
        return torch.cat((first[0], second[0])), torch.cat((first[1], second[1]))

    def _run_whole(self, host: HostBatch) -> tuple[torch.Tensor, torch.Tensor]:
        batch = ForwardBatch.of(host, self._rows)
        self.model.backend.begin(batch, self._kv_cache.padding_slot)
        out = torch.empty(host.num_tokens, self.model.hidden_size, dtype=self._kv_cache.layers[0].dtype)
        hidden = self.model.forward(batch.token_ids, self._kv_cache, out=out)
        if not len(host.sampled_rows):
            return torch.empty(0, dtype=torch.int32), torch.empty(0)
        logits = self.model.logits(hidden[batch.sampled_tokens])
        token_ids, logprobs = self._sampler.sample(logits, batch, self._rows)
        self._rows.next_token[batch.sampled_rows] = token_ids
        return token_ids, logprobs


CpuEngine: TypeAlias = Engine[CpuRunner]
