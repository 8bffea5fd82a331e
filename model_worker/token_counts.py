"""What each running request has seen so far, on the device: what penalties are computed from."""

import torch

from lightserve.ipc.messages import NewReq, unpack_int32
from lightserve.kernels.penalties import count_tokens
from lightserve.model_worker.upload import upload


class TokenCounts:
    """One row of counts for each running request that has penalties; the rows of others hold anything.

    Args:
        num_rows: Most running requests; one row more stands in for padding.
        vocab_size: Ids that have text.
        device: Where the logits are.

    Attributes:
        counts: [num_rows + 1, vocab_size] int32, as ``kernels/penalties.py`` defines them.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        # Not filled: a row is reset when a request that has penalties enters it.
        self.counts = torch.empty(num_rows + 1, vocab_size, dtype=torch.int32, device=device)

    def enter(self, req: NewReq) -> None:
        """Start the row of a request that enters the batch, if it has penalties, from the ids that it brings."""
        if req.sampling.has_penalties:
            ids = upload(unpack_int32(req.ids), self.counts.device)
            count_tokens(self.counts, req.req_row, ids, req.prompt_len)
