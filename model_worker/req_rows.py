"""What the worker knows of each running request: its row of the Token Table, its length, its ids still to prefill."""

import numpy as np
import numpy.typing as npt
import torch

from lightserve.errors import InvariantError
from lightserve.ipc.messages import NewReq, unpack_int32
from lightserve.model_worker.upload import upload


class ReqRows:
    """State per row. Lengths and prompts live on the host; what a step reads on the device stays on the device.

    Args:
        num_rows: Most running requests. One more row, the last, stands in for padding.
        max_req_total_len: Width of the Token Table.
        device: Where the Token Table and the ids sampled last are.

    Attributes:
        num_rows: Most running requests.
        req_to_slots: [num_rows + 1, max_req_total_len] int32, the Token Table: slot of each position. Entries at or
            beyond a row's length are stale, but some slot's.
        next_token: [num_rows + 1] int32, the id sampled last; -1 when that failed.
        seq_lens: [num_rows + 1] int32 on the host, tokens whose K and V the plans so far have placed.
        prompt_lens: [num_rows + 1] int32 on the host.
    """

    def __init__(self, num_rows: int, max_req_total_len: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.req_to_slots = torch.zeros(num_rows + 1, max_req_total_len, dtype=torch.int32, device=device)
        self.next_token = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = np.zeros(num_rows + 1, dtype=np.int32)
        self.prompt_lens = np.zeros(num_rows + 1, dtype=np.int32)
        self._ids: dict[int, npt.NDArray[np.int32]] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def enter(self, req: NewReq) -> None:
        """Take a request into a free row.

        Raises:
            InvariantError: The row is taken or not ours.
        """
        if req.req_row in self._ids or not 0 <= req.req_row < self.num_rows:
            raise InvariantError(f"row {req.req_row} is taken or outside the {self.num_rows} rows")
        cached_slots = unpack_int32(req.cached_slots)
        self._ids[req.req_row] = unpack_int32(req.ids)
        self.seq_lens[req.req_row] = len(cached_slots)
        if len(cached_slots):
            self.req_to_slots[req.req_row, : len(cached_slots)] = upload(cached_slots, self.req_to_slots.device)
        self.prompt_lens[req.req_row] = req.prompt_len

    def release(self, req_rows: npt.NDArray[np.int32]) -> None:
        """Forget requests that have ended.

        Raises:
            InvariantError: A row is free.
        """
        for req_row in req_rows.tolist():
            if self._ids.pop(req_row, None) is None:
                raise InvariantError(f"row {req_row} was released but is free")

    def ids(self, req_row: int, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Ids [start, stop) that a request came with.

        Raises:
            InvariantError: The row is free or has no such ids.
        """
        ids = self._ids.get(req_row)
        if ids is None or not 0 <= start < stop <= len(ids):
            raise InvariantError(f"row {req_row} has no ids [{start}, {stop})")
        return ids[start:stop]

    def num_ids(self, req_row: int) -> int:
        """How many ids a request came with."""
        return len(self._ids[req_row])
