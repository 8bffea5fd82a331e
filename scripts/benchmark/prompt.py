"""One prompt of a workload, whatever it was made from."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Prompt:
    """What to send, and how long an answer to ask for.

    Attributes:
        body: Text, or [prompt_len] int32 token ids.
        prompt_len: Its length in tokens.
        output_len: Tokens to ask for.
        timestamp_s: When a trace says it arrived, seconds after the trace's first; None where nothing says so.
    """

    body: str | npt.NDArray[np.int32]
    prompt_len: int
    output_len: int
    timestamp_s: float | None = None

    def content(self) -> str | list[int]:
        """Return the prompt as it stands in a request body."""
        return self.body if isinstance(self.body, str) else self.body.tolist()
