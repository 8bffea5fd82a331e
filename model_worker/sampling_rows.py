"""Sampling parameters of every row, on the host: a step sends along what its rows need."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightserve.ipc.messages import NewReq
from lightserve.kernels.sampling import GREEDY_BELOW
from lightserve.model_worker.host_batch import HostBatch, Int32Array
from lightserve.model_worker.req_rows import ReqRows


class SamplingRows:
    """One array per parameter, indexed by row.

    Args:
        num_rows: Most running requests; one row more, greedy and without penalties, stands in for padding.
        eos_token_ids: The model's, forbidden until a request's ``min_new_tokens``.

    Attributes:
        temperature: [num_rows + 1] float32.
        top_k: [num_rows + 1] int32.
        top_p: [num_rows + 1] float32.
        min_p: [num_rows + 1] float32.
        repetition: [num_rows + 1] float32.
        presence: [num_rows + 1] float32.
        frequency: [num_rows + 1] float32.
        seeds: [num_rows + 1] int64.
        is_greedy: [num_rows + 1] bool.
        has_penalties: [num_rows + 1] bool.
    """

    def __init__(self, num_rows: int, eos_token_ids: Sequence[int]) -> None:
        self.temperature = np.zeros(num_rows + 1, dtype=np.float32)
        self.top_k = np.zeros(num_rows + 1, dtype=np.int32)
        self.top_p = np.ones(num_rows + 1, dtype=np.float32)
        self.min_p = np.zeros(num_rows + 1, dtype=np.float32)
        self.repetition = np.ones(num_rows + 1, dtype=np.float32)
        self.presence = np.zeros(num_rows + 1, dtype=np.float32)
        self.frequency = np.zeros(num_rows + 1, dtype=np.float32)
        self.seeds = np.zeros(num_rows + 1, dtype=np.int64)
        self.is_greedy = np.ones(num_rows + 1, dtype=np.bool_)
        self.has_penalties = np.zeros(num_rows + 1, dtype=np.bool_)
        self._may_adjust = np.zeros(num_rows + 1, dtype=np.bool_)
        self._min_new_tokens = np.zeros(num_rows + 1, dtype=np.int32)
        self._stop_token_ids: dict[int, tuple[int, ...]] = {}
        self._eos_token_ids = tuple(eos_token_ids)

    def enter(self, req: NewReq) -> None:
        """Take over the parameters of a request that enters the batch."""
        row, params = req.req_row, req.sampling
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.seeds[row] = params.seed
        self.is_greedy[row] = params.temperature < GREEDY_BELOW
        self.has_penalties[row] = params.has_penalties
        self._may_adjust[row] = params.has_penalties or params.min_new_tokens > 0
        self._min_new_tokens[row] = params.min_new_tokens
        self._stop_token_ids[row] = params.stop_token_ids

    def adjusts(self, batch: HostBatch, rows: ReqRows) -> bool:
        """Tell whether penalties or forbidden ids change anybody's logits in this step."""
        sampled = batch.sampled_rows
        if not self._may_adjust[sampled].any():
            return False
        return bool(self.has_penalties[sampled].any() or self.too_short(batch, rows).any())

    def too_short(self, batch: HostBatch, rows: ReqRows) -> npt.NDArray[np.bool_]:
        """[num_sampled]: rows that may not end yet."""
        sampled = batch.sampled_rows
        num_output = batch.sampled_positions - rows.prompt_lens[sampled]
        return num_output < self._min_new_tokens[sampled]

    def forbidden_ids(self, sampled_rows: Int32Array, too_short: npt.NDArray[np.bool_], width: int = 0) -> Int32Array:
        """List the ids that end a text, for rows that may not end yet.

        Args:
            sampled_rows: [num_sampled].
            too_short: From ``too_short``.
            width: Columns at least.

        Returns:
            [num_sampled, columns], padded with -1.
        """
        lists = {
            index: self._eos_token_ids + self._stop_token_ids[int(sampled_rows[index])]
            for index in np.flatnonzero(too_short).tolist()
        }
        padded = np.full((len(sampled_rows), max([width, *map(len, lists.values())])), -1, dtype=np.int32)
        for index, ids in lists.items():
            padded[index, : len(ids)] = ids
        return padded
