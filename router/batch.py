"""The running requests: rows of the Token Table, and one array per fact that every step reads or changes."""

import numpy as np

from lightserve.errors import InvariantError
from lightserve.router.arrays import IdArray, RowArray, SlotArray, row_table
from lightserve.router.request import Req


class Batch:
    """Everything here is indexed by row, as the model worker's own tables are.

    Attributes:
        req_ids: [max_rows] int64, -1 where the row is free.
        stays: [max_rows] int64, counts up with each request that gets a row: a paused request comes back as another.
        seq_lens: [max_rows] int32, tokens whose K and V the steps planned so far write.
        final_lens: [max_rows] int32, ``seq_lens`` when the last token has been planned.
        ignores_eos: [max_rows] bool.
        has_stop_ids: [max_rows] bool, the client named stop ids of its own.
        last_slots: [max_rows] int32, the slot of position ``seq_len - 1``; -1 while there is none.
        ids: [max_rows, max_len + 1] int32, prompt and output as far as known.
        slots: [max_rows, max_len] int32; a row's [node.end, seq_len) are the request's own.
        decode_rows: [num_decode] int32, the rows to decode next, in the order in which they joined.

    Args:
        max_rows: Requests that may run at once.
        max_len: Most slots that one request holds.
    """

    def __init__(self, max_rows: int, max_len: int) -> None:
        self.reqs: list[Req | None] = [None] * max_rows
        self.req_ids = np.full(max_rows, -1, dtype=np.int64)
        self.stays = np.full(max_rows, -1, dtype=np.int64)
        self.seq_lens = np.zeros(max_rows, dtype=np.int32)
        self.final_lens = np.zeros(max_rows, dtype=np.int32)
        self.ignores_eos = np.zeros(max_rows, dtype=np.bool_)
        self.has_stop_ids = np.zeros(max_rows, dtype=np.bool_)
        self.last_slots = np.zeros(max_rows, dtype=np.int32)
        self.ids = row_table(max_rows, max_len + 1)
        self.slots = row_table(max_rows, max_len)
        self.decode_rows: RowArray = np.zeros(0, dtype=np.int32)
        self._free_rows = list(reversed(range(max_rows)))
        self._num_stays = 0

    def __len__(self) -> int:
        return len(self.reqs) - len(self._free_rows)

    @property
    def is_full(self) -> bool:
        """Whether no row is free."""
        return not self._free_rows

    @property
    def max_slots(self) -> int:
        """Most slots that the running requests would hold if all went on to their ends."""
        return int(self.final_lens[self.req_ids >= 0].sum())

    def add(self, req: Req) -> None:
        """Give a request a row."""
        row = self._free_rows.pop()
        self._num_stays += 1
        self.reqs[row] = req
        self.req_ids[row] = req.req_id
        self.stays[row] = self._num_stays
        self.seq_lens[row] = 0
        self.final_lens[row] = req.max_slots
        self.ignores_eos[row] = req.sampling.ignore_eos
        self.has_stop_ids[row] = bool(req.sampling.stop_token_ids)
        self.last_slots[row] = -1
        self.ids[row, : len(req.ids)] = req.ids
        req.row = row

    def remove(self, req: Req) -> None:
        """Take a request's row back."""
        row = req.row
        self.reqs[row] = None
        self.req_ids[row] = -1
        self.stays[row] = -1
        self.decode_rows = self.decode_rows[self.decode_rows != row]
        self._free_rows.append(row)
        req.row = -1

    def req_at(self, row: int) -> Req:
        """Tell whose a row is.

        Raises:
            InvariantError: It is nobody's.
        """
        req = self.reqs[row]
        if req is None:
            raise InvariantError(f"row {row} belongs to no request")
        return req

    def extend_prompt(self, req: Req, slots: SlotArray) -> None:
        """Let a request's prompt grow by a stretch, [n] int32: what the cache has of it, or a chunk."""
        start = int(self.seq_lens[req.row])
        self.slots[req.row, start : start + len(slots)] = slots
        self.last_slots[req.row] = slots[-1]
        self.seq_lens[req.row] = start + len(slots)

    def append(self, rows: RowArray, slots: SlotArray) -> None:
        """Let rows grow by one token each; both [n] int32."""
        self.slots[rows, self.seq_lens[rows]] = slots
        self.last_slots[rows] = slots
        self.seq_lens[rows] += 1

    def own_slots(self, req: Req, start: int) -> SlotArray:
        """Tell where a running request's tokens from position ``start`` on lie: a view, [seq_len - start] int32."""
        return self.slots[req.row, start : self.seq_lens[req.row]]

    def ids_between(self, req: Req, start: int, end: int) -> IdArray:
        """Tell a running request's ids ``[start, end)``: a view, int32."""
        return self.ids[req.row, start:end]
