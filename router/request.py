"""The router's state of one request."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightserve.ipc.messages import GenerateMsg, unpack_int32
from lightserve.sampling_params import SamplingParams

IdArray: TypeAlias = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Req:
    """One request, waiting or running. What changes with every step stands in the ``Batch``, at ``row``.

    Attributes:
        req_id: Its name.
        prompt_ids: [prompt_len] int32.
        sampling: How it chooses its tokens.
        row: Its row of the Token Table while it runs, else -1.
        holds_slots: It holds slots: from admission until its last step has been planned.
    """

    req_id: int
    prompt_ids: IdArray
    sampling: SamplingParams
    row: int = -1
    holds_slots: bool = False

    @classmethod
    def from_message(cls, message: GenerateMsg) -> "Req":
        """Make a waiting request."""
        return cls(message.req_id, unpack_int32(message.prompt_ids), message.sampling)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def is_running(self) -> bool:
        """Whether it has left the queue."""
        return self.row >= 0

    @property
    def max_slots(self) -> int:
        """Most slots it will ever hold: its last token is never fed back, so needs none."""
        return self.prompt_len + self.sampling.max_new_tokens - 1
