"""One answer to generate, before the router knows of it."""

import msgspec

from lightserve.ipc.messages import GenerateMsg, Int32s, TextParams, count_int32
from lightserve.sampling_params import SamplingParams


class Choice(msgspec.Struct, frozen=True):
    """One answer to generate: a ``GenerateMsg`` before it has its number."""

    prompt_ids: Int32s
    sampling: SamplingParams
    text: TextParams
    priority: int = 0
    timeout_s: float = 0.0
    cache_salt: str = ""

    def message(self, req_id: int) -> GenerateMsg:
        """Make the message to the router."""
        return GenerateMsg(
            req_id, self.prompt_ids, self.sampling, self.text, self.priority, self.timeout_s, self.cache_salt
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return count_int32(self.prompt_ids)
