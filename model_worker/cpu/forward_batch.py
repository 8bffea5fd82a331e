"""One step's batch as the model on a CPU reads it."""

from dataclasses import dataclass

import numpy as np
import torch

from lightserve.model_worker.host_batch import HostBatch
from lightserve.model_worker.req_rows import ReqRows


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tensors over one packed copy of a batch.

    Attributes:
        host: The same batch in arrays, for what is decided in Python.
        req_to_slots: The Token Table, with this step's slots in it.
        token_ids: [num_tokens] int32, none negative.
        positions: [num_tokens] int32.
        out_slots: [num_tokens] int32.
        req_rows: [num_reqs] int32.
        seq_lens: [num_reqs] int32, including this step's tokens.
        cu_seqlens: [num_reqs + 1] int32.
        sampled_tokens: [num_sampled] int32.
        sampled_rows: [num_sampled] int32.
        sampled_positions: [num_sampled] int32.
    """

    host: HostBatch
    req_to_slots: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor
    req_rows: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens: torch.Tensor
    sampled_tokens: torch.Tensor
    sampled_rows: torch.Tensor
    sampled_positions: torch.Tensor

    @classmethod
    def of(cls, host: HostBatch, rows: ReqRows) -> "ForwardBatch":
        """Pack a batch, fill in the decode rows' ids, and enter its slots in the Token Table."""
        parts = (
            host.token_ids,
            host.positions,
            host.out_slots,
            host.req_rows,
            host.seq_lens,
            host.cu_seqlens,
            host.sampled_tokens,
            host.sampled_rows,
            host.sampled_positions,
            host.token_rows,
        )
        packed = torch.from_numpy(np.concatenate(parts))
        *views, token_rows = torch.split(packed, [len(part) for part in parts])
        batch = cls(host, rows.req_to_slots, *views)
        _fill_decode_ids(batch, rows.next_token)
        rows.req_to_slots[token_rows, batch.positions] = batch.out_slots
        return batch


def _fill_decode_ids(batch: ForwardBatch, next_token: torch.Tensor) -> None:
    num_decode = batch.host.num_decode
    # A row whose last id is -1 has failed; it runs once more before the router knows, on any id.
    batch.token_ids[:num_decode] = next_token[batch.req_rows[:num_decode]].clamp_(min=0)
