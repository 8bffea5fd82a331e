"""From logits to one new id per row: each row by its own request's parameters."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lightserve.ipc.messages import NewReq, unpack_int32
from lightserve.kernels.penalties import count_sampled, count_tokens
from lightserve.kernels.sampling import GREEDY_BELOW
from lightserve.model_worker.forward_batch import ForwardBatch, Int32Array
from lightserve.model_worker.layers.backend import SamplingOps
from lightserve.model_worker.req_rows import ReqRows
from lightserve.sampling_params import SamplingParams

_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = range(6)


class Sampler:
    """Sampling parameters of every row, and the draw.

    Args:
        num_rows: Most running requests.
        vocab_size: Ids that have text; others are never sampled.
        eos_token_ids: The model's, forbidden until a request's ``min_new_tokens``.
        ops: The device's implementation.
        device: Where the logits are.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, eos_token_ids: Sequence[int], *, ops: SamplingOps, device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._ops = ops
        self._device = device
        self._numbers = torch.zeros(num_rows + 1, 6, device=device)  # float32, in the order of the names above
        self._top_k = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self._seeds = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        # Not filled: a row is reset when a request that has penalties enters it.
        self._token_counts = torch.empty(num_rows + 1, vocab_size, dtype=torch.int32, device=device)
        self._is_greedy = np.ones(num_rows + 1, dtype=np.bool_)
        self._has_penalties = np.zeros(num_rows + 1, dtype=np.bool_)
        self._min_new_tokens = np.zeros(num_rows + 1, dtype=np.int32)
        self._stop_token_ids: dict[int, tuple[int, ...]] = {}

    def enter(self, new_reqs: Sequence[NewReq]) -> None:
        """Take over the parameters of requests that enter the batch."""
        if not new_reqs:
            return
        rows = torch.tensor([req.req_row for req in new_reqs], device=self._device)
        params = [req.sampling for req in new_reqs]
        self._numbers[rows] = torch.tensor([_numbers(p) for p in params], device=self._device)
        self._top_k[rows] = torch.tensor([p.top_k for p in params], dtype=torch.int32, device=self._device)
        self._seeds[rows] = torch.tensor([p.seed for p in params], dtype=torch.int64, device=self._device)
        for req in new_reqs:
            self._enter_on_host(req)

    def _enter_on_host(self, req: NewReq) -> None:
        row, params = req.req_row, req.sampling
        self._is_greedy[row] = params.temperature < GREEDY_BELOW
        self._has_penalties[row] = _has_penalties(params)
        self._min_new_tokens[row] = params.min_new_tokens
        self._stop_token_ids[row] = params.stop_token_ids
        if self._has_penalties[row]:
            ids = torch.from_numpy(unpack_int32(req.ids).copy()).to(self._device)
            count_tokens(self._token_counts, row, ids, req.prompt_len)

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
        host_rows = batch.host.sampled_rows
        scores = self._scores(logits, batch, rows)
        if scores is None and self._is_greedy[host_rows].all():
            return self._ops.greedy(logits, vocab_size=self._vocab_size)
        numbers = self._numbers[batch.sampled_rows]
        token_ids, logprobs = self._ops.sample(
            logits,
            numbers[:, _TEMPERATURE],
            self._top_k[batch.sampled_rows],
            numbers[:, _TOP_P],
            numbers[:, _MIN_P],
            self._seeds[batch.sampled_rows],
            batch.sampled_positions,
            vocab_size=self._vocab_size,
            scores=scores,
        )
        self._count(batch, token_ids)
        return token_ids, logprobs

    def _scores(self, logits: torch.Tensor, batch: ForwardBatch, rows: ReqRows) -> torch.Tensor | None:
        """Give the logits after penalties and forbidden ids, in float32; None when no row changes any."""
        host_rows = batch.host.sampled_rows
        penalised = np.flatnonzero(self._has_penalties[host_rows])
        num_output = batch.host.sampled_positions - rows.prompt_lens[host_rows]
        too_short = np.flatnonzero(num_output < self._min_new_tokens[host_rows])
        if not len(penalised) and not len(too_short):
            return None
        scores = logits[:, : self._vocab_size].to(torch.float32, copy=True)
        if len(penalised):
            members = torch.from_numpy(penalised).to(self._device)
            scores[members] = self._penalise(scores[members], batch.sampled_rows[members])
        if len(too_short):
            self._ops.forbid(scores, self._forbidden_ids(host_rows, too_short))
        return scores

    def _penalise(self, scores: torch.Tensor, req_rows: torch.Tensor) -> torch.Tensor:
        numbers = self._numbers[req_rows]
        return self._ops.penalties(
            scores,
            self._token_counts,
            req_rows,
            numbers[:, _REPETITION],
            numbers[:, _PRESENCE],
            numbers[:, _FREQUENCY],
        )

    def _forbidden_ids(self, host_rows: Int32Array, too_short: npt.NDArray[np.intp]) -> torch.Tensor:
        """[num_sampled, width] int32, padded with -1."""
        lists: list[tuple[int, ...]] = [()] * len(host_rows)
        for index in too_short.tolist():
            lists[index] = self._eos_token_ids + self._stop_token_ids[int(host_rows[index])]
        width = max(map(len, lists))
        padded = [[*ids, *[-1] * (width - len(ids))] for ids in lists]
        return torch.tensor(padded, dtype=torch.int32, device=self._device)

    def _count(self, batch: ForwardBatch, token_ids: torch.Tensor) -> None:
        penalised = np.flatnonzero(self._has_penalties[batch.host.sampled_rows])
        if len(penalised):
            members = torch.from_numpy(penalised).to(self._device)
            count_sampled(self._token_counts, batch.sampled_rows[members], token_ids[members])


def _numbers(params: SamplingParams) -> tuple[float, ...]:
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
