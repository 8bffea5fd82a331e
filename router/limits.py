"""What the scheduler must keep to: settled once the model workers have measured."""

from dataclasses import dataclass

# While a target for inter-token latency sizes the chunks, a prompt still advances by so many tokens a step.
_LEAST_CHUNK = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound the scheduler knows.

    Attributes:
        max_total_token_num: Slots of the pool.
        max_req_total_len: Most tokens of prompt and answer together.
        running_max_req_size: Most requests in the batch; below ``batch_max_tokens``.
        batch_max_tokens: Most tokens of one step.
        chunked_prefill_size: Most prompt tokens of one step.
        max_queued_reqs: Most waiting requests.
        eos_token_ids: Ids that end a text.
        has_prefix_cache: Prompts that begin alike share their slots.
        max_itl_s: Prompts are cut so that a step takes no longer than this; 0: never.
    """

    max_total_token_num: int
    max_req_total_len: int
    running_max_req_size: int
    batch_max_tokens: int
    chunked_prefill_size: int
    max_queued_reqs: int
    eos_token_ids: tuple[int, ...]
    has_prefix_cache: bool = True
    max_itl_s: float = 0.0

    @property
    def max_slots_per_req(self) -> int:
        """Most slots that one request can hold."""
        return min(self.max_req_total_len, self.max_total_token_num)

    @property
    def least_prefill_tokens(self) -> int:
        """Prompt tokens that a step always has room for, whatever else it runs."""
        least = self.prefill_tokens(self.running_max_req_size)
        return min(least, _LEAST_CHUNK) if self.max_itl_s else least

    def prefill_tokens(self, num_decode: int) -> int:
        """Prompt tokens that a step has room for beside so many decode rows."""
        return min(self.chunked_prefill_size, self.batch_max_tokens - num_decode)
