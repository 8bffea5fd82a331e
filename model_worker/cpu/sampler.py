"""From logits to one new id per row, each by its own request's parameters, as the batch comes: decided on the host."""

from collections.abc import Sequence

import numpy as np
import torch

from lightserve.ipc.messages import NewReq
from lightserve.kernels.penalties import count_sampled, forbid_reference
from lightserve.model_worker.cpu.forward_batch import ForwardBatch
from lightserve.model_worker.cpu.sampling_ops import greedy, penalties, sample
from lightserve.model_worker.host_batch import Int32Array
from lightserve.model_worker.req_rows import ReqRows
from lightserve.model_worker.sampling_rows import SamplingRows
from lightserve.model_worker.token_counts import TokenCounts


class Sampler:
    """Sampling parameters of every row, and the draw.

    Args:
        num_rows: Most running requests.
        vocab_size: Ids that have text; others are never sampled.
        eos_token_ids: The model's, forbidden until a request's ``min_new_tokens``.
    """

    def __init__(self, num_rows: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._params = SamplingRows(num_rows, eos_token_ids)
        self._token_counts = TokenCounts(num_rows, vocab_size, torch.device("cpu"))

    def enter(self, new_reqs: Sequence[NewReq]) -> None:
        """Take over the parameters of requests that enter the batch."""
        for req in new_reqs:
            self._params.enter(req)
            self._token_counts.enter(req)

    def sample(self, logits: torch.Tensor, batch: ForwardBatch, rows: ReqRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose one id per sampled token of the batch.

        Args:
            logits: [num_sampled, at least vocab_size].
            batch: The batch they come from.
            rows: For prompt lengths.

        Returns:
            ids [num_sampled] int32, -1 where a row's logits were not finite; logprobs [num_sampled] float32, of the
            chosen ids under the unchanged logits.
        """
        params, sampled = self._params, batch.host.sampled_rows
        scores = self._scores(logits, batch, rows)
        if scores is None and params.is_greedy[sampled].all():
            return greedy(logits, vocab_size=self._vocab_size)
        token_ids, logprobs = sample(
            logits,
            torch.from_numpy(params.temperature[sampled]),
            torch.from_numpy(params.top_k[sampled]),
            torch.from_numpy(params.top_p[sampled]),
            torch.from_numpy(params.min_p[sampled]),
            torch.from_numpy(params.seeds[sampled]),
            batch.sampled_positions,
            vocab_size=self._vocab_size,
            scores=scores,
        )
        self._count(batch, token_ids)
        return token_ids, logprobs

    def _scores(self, logits: torch.Tensor, batch: ForwardBatch, rows: ReqRows) -> torch.Tensor | None:
        """Give the logits after penalties and forbidden ids, in float32; None when no row changes any."""
        if not self._params.adjusts(batch.host, rows):
            return None
        sampled = batch.host.sampled_rows
        penalised = np.flatnonzero(self._params.has_penalties[sampled])
        too_short = self._params.too_short(batch.host, rows)
        scores = logits[:, : self._vocab_size].to(torch.float32, copy=True)
        if len(penalised):
            members = torch.from_numpy(penalised)
            scores[members] = self._penalise(scores[members], sampled[penalised])
        if too_short.any():
            forbid_reference(scores, torch.from_numpy(self._params.forbidden_ids(sampled, too_short)))
        return scores

    def _penalise(self, scores: torch.Tensor, req_rows: Int32Array) -> torch.Tensor:
        return penalties(
            scores,
            self._token_counts.counts,
            torch.from_numpy(req_rows),
            torch.from_numpy(self._params.repetition[req_rows]),
            torch.from_numpy(self._params.presence[req_rows]),
            torch.from_numpy(self._params.frequency[req_rows]),
        )

    def _count(self, batch: ForwardBatch, token_ids: torch.Tensor) -> None:
        penalised = np.flatnonzero(self._params.has_penalties[batch.host.sampled_rows])
        if len(penalised):
            members = torch.from_numpy(penalised)
            count_sampled(self._token_counts.counts, batch.sampled_rows[members], token_ids[members])
