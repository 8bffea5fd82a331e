"""One step's batch: which tokens run, where they stand, where their K and V go, and which of them are sampled."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightserve.errors import InvariantError
from lightserve.ipc.messages import StepPlan, unpack_int32
from lightserve.model_worker.req_rows import ReqRows

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class HostBatch:
    """The batch as the host knows it: decode rows first, one token each, then prefill chunks.

    Attributes:
        num_decode: How many of the requests are decode rows.
        req_rows: [num_reqs] int32.
        starts: [num_reqs] int32, position of the first token of each.
        extend_lens: [num_reqs] int32, tokens of each, at least 1.
        is_sampled: [num_reqs] bool: this step brings the request a new id.
        token_ids: [num_tokens] int32; 0 for decode rows, whose id only the device knows.
        out_slots: [num_tokens] int32.
    """

    num_decode: int
    req_rows: Int32Array
    starts: Int32Array
    extend_lens: Int32Array
    is_sampled: npt.NDArray[np.bool_]
    token_ids: Int32Array
    out_slots: Int32Array

    @classmethod
    def of(cls, plan: StepPlan, rows: ReqRows) -> "HostBatch":
        """Lay out a plan whose new requests have entered ``rows``.

        Raises:
            InvariantError: The plan contradicts itself or the rows.
        """
        decode_rows = unpack_int32(plan.decode_rows)
        batch = (
            cls._of_chunks(plan, decode_rows, rows) if plan.prefill_rows else cls._of_decodes(plan, decode_rows, rows)
        )
        batch._check(plan.step_id, rows)
        return batch

    @classmethod
    def _of_decodes(cls, plan: StepPlan, decode_rows: Int32Array, rows: ReqRows) -> "HostBatch":
        num_decode = len(decode_rows)
        return cls(
            num_decode=num_decode,
            req_rows=decode_rows,
            starts=rows.seq_lens[decode_rows],
            extend_lens=np.ones(num_decode, dtype=np.int32),
            is_sampled=np.ones(num_decode, dtype=np.bool_),
            token_ids=np.zeros(num_decode, dtype=np.int32),
            out_slots=unpack_int32(plan.out_slots),
        )

    @classmethod
    def _of_chunks(cls, plan: StepPlan, decode_rows: Int32Array, rows: ReqRows) -> "HostBatch":
        prefill_rows = unpack_int32(plan.prefill_rows)
        prefill_starts, prefill_lens = unpack_int32(plan.prefill_starts), unpack_int32(plan.prefill_lens)
        prefill_stops = prefill_starts + prefill_lens
        chunks = list(zip(prefill_rows.tolist(), prefill_starts.tolist(), prefill_stops.tolist(), strict=True))
        decode_ids = np.zeros(len(decode_rows), dtype=np.int32)
        chunk_ids = [rows.ids(*chunk) for chunk in chunks]
        ends_prompt = [stop == rows.num_ids(req_row) for req_row, _, stop in chunks]
        return cls(
            num_decode=len(decode_rows),
            req_rows=np.concatenate((decode_rows, prefill_rows)),
            starts=np.concatenate((rows.seq_lens[decode_rows], prefill_starts)),
            extend_lens=np.concatenate((np.ones_like(decode_rows), prefill_lens)),
            is_sampled=np.concatenate((np.ones(len(decode_rows), dtype=np.bool_), np.array(ends_prompt, np.bool_))),
            token_ids=np.concatenate((decode_ids, *chunk_ids)),
            out_slots=unpack_int32(plan.out_slots),
        )

    def _check(self, step_id: int, rows: ReqRows) -> None:
        if len(self.out_slots) != len(self.token_ids):
            raise InvariantError(f"step {step_id}: {len(self.token_ids)} tokens but {len(self.out_slots)} slots")
        if not self.only_decodes and not np.array_equal(self.starts, rows.seq_lens[self.req_rows]):
            raise InvariantError(f"step {step_id}: chunks start at {self.starts}, not where their rows stand")
        if int(self.seq_lens.max(initial=0)) > rows.req_to_slots.shape[1]:
            raise InvariantError(f"step {step_id}: a request of {self.seq_lens.max()} tokens outgrew the Token Table")

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.req_rows)

    @property
    def num_chunks(self) -> int:
        """Prefill chunks in the batch."""
        return self.num_reqs - self.num_decode

    @property
    def only_decodes(self) -> bool:
        """Whether there are no chunks: then each request has one token, in order, and each is sampled."""
        return self.num_decode == len(self.req_rows)

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch."""
        return len(self.token_ids)

    @cached_property
    def seq_lens(self) -> Int32Array:
        """[num_reqs] int32, length of each request including this step's tokens."""
        return self.starts + self.extend_lens

    @cached_property
    def cu_seqlens(self) -> Int32Array:
        """[num_reqs + 1] int32: tokens of request i are [cu_seqlens[i], cu_seqlens[i + 1])."""
        bounds = np.zeros(self.num_reqs + 1, dtype=np.int32)
        np.cumsum(self.extend_lens, out=bounds[1:])
        return bounds

    @property
    def token_rows(self) -> Int32Array:
        """[num_tokens] int32, each token's row."""
        return self.req_rows if self.only_decodes else np.repeat(self.req_rows, self.extend_lens)

    @property
    def positions(self) -> Int32Array:
        """[num_tokens] int32, each token's position in its request."""
        if self.only_decodes:
            return self.starts
        firsts = np.repeat(self.starts - self.cu_seqlens[:-1], self.extend_lens)
        return (firsts + np.arange(self.num_tokens)).astype(np.int32)

    @cached_property
    def sampled_rows(self) -> Int32Array:
        """[num_sampled] int32, rows that get a new id, in sampling order."""
        return self.req_rows if self.only_decodes else self.req_rows[self.is_sampled]

    @cached_property
    def sampled_positions(self) -> Int32Array:
        """[num_sampled] int32, absolute position of each new id."""
        return self.seq_lens if self.only_decodes else self.seq_lens[self.is_sampled]

    @property
    def sampled_tokens(self) -> Int32Array:
        """[num_sampled] int32, index in the batch of the token whose logits give the new id."""
        if self.only_decodes:
            return np.arange(self.num_decode, dtype=np.int32)
        return self.cu_seqlens[1:][self.is_sampled] - 1

    def halves(self) -> tuple["HostBatch", "HostBatch"]:
        """Split into two batches that, run one after the other, do the same.

        Raises:
            InvariantError: There is one token only.
        """
        if self.num_tokens < 2:
            raise InvariantError("a batch of one token cannot be split")
        middle = self.num_tokens // 2
        index = int(np.searchsorted(self.cu_seqlens, middle, side="right")) - 1  # the request that token belongs to
        head_len = middle - int(self.cu_seqlens[index])
        first = self._requests(0, index) if head_len == 0 else self._requests(0, index + 1)._cut_last(head_len)
        return first, self._requests(index, self.num_reqs)._skip_first(head_len)

    def _requests(self, start: int, stop: int) -> "HostBatch":
        tokens = slice(int(self.cu_seqlens[start]), int(self.cu_seqlens[stop]))
        return HostBatch(
            num_decode=max(0, min(self.num_decode, stop) - start),
            req_rows=self.req_rows[start:stop],
            starts=self.starts[start:stop],
            extend_lens=self.extend_lens[start:stop],
            is_sampled=self.is_sampled[start:stop],
            token_ids=self.token_ids[tokens],
            out_slots=self.out_slots[tokens],
        )

    def _cut_last(self, extend_len: int) -> "HostBatch":
        """Keep the first ``extend_len`` tokens of the last request, which is then not sampled."""
        dropped = int(self.extend_lens[-1]) - extend_len
        kept = slice(0, self.num_tokens - dropped)
        return replace(
            self,
            extend_lens=np.append(self.extend_lens[:-1], np.int32(extend_len)),
            is_sampled=np.append(self.is_sampled[:-1], False),
            token_ids=self.token_ids[kept],
            out_slots=self.out_slots[kept],
        )

    def _skip_first(self, num_tokens: int) -> "HostBatch":
        """Leave out the first tokens of the first request."""
        skipped = np.zeros_like(self.starts)
        skipped[0] = num_tokens
        return replace(
            self,
            starts=self.starts + skipped,
            extend_lens=self.extend_lens - skipped,
            token_ids=self.token_ids[num_tokens:],
            out_slots=self.out_slots[num_tokens:],
        )
