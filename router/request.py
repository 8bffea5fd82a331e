"""The router's state of one request."""

from dataclasses import dataclass, field

from lightserve.ipc.messages import GenerateMsg, unpack_int32
from lightserve.router.arrays import IdArray
from lightserve.router.prefix_tree import Node
from lightserve.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Req:
    """One request, waiting or running. What changes with every step stands in the ``Batch``, at ``row``.

    While it runs, of its sequence
        [0, node.end)        is shared: owned by the prefix cache, locked by this request,
        [node.end, seq_len)  is its own: kept by the cache or freed when it leaves the batch.

    Attributes:
        req_id: Its name.
        arrival: Counts up over all requests.
        ids: [num_ids] int32: the prompt; after a pause, the prompt and the output so far.
        prompt_len: Ids of the prompt.
        sampling: How it chooses its tokens.
        priority: Higher goes first.
        cache_salt: Whose cached prompts it may share.
        row: Its row of the Token Table while it runs, else -1.
        node: The end of what it shares, while it holds slots: from admission until its last step has been planned.
        matched_len: Ids that the cache had when it was admitted last.
        cached_len: Ids of its prompt that the cache had when it was admitted first; -1 before.
    """

    req_id: int
    arrival: int
    ids: IdArray
    prompt_len: int
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    row: int = -1
    node: Node | None = field(default=None, repr=False)
    matched_len: int = 0
    cached_len: int = -1

    @classmethod
    def from_message(cls, message: GenerateMsg, arrival: int) -> "Req":
        """Make a waiting request."""
        ids = unpack_int32(message.prompt_ids)
        return cls(message.req_id, arrival, ids, len(ids), message.sampling, message.priority, message.cache_salt)

    @property
    def is_running(self) -> bool:
        """Whether it has left the queue."""
        return self.row >= 0

    @property
    def num_produced(self) -> int:
        """Tokens that it had produced when it came into the queue."""
        return len(self.ids) - self.prompt_len

    @property
    def max_new_tokens(self) -> int:
        """Tokens that it might still produce when it came into the queue."""
        return self.sampling.max_new_tokens - self.num_produced

    @property
    def max_slots(self) -> int:
        """Most slots it will ever hold: its last token is never fed back, so needs none."""
        return self.prompt_len + self.sampling.max_new_tokens - 1

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts requests: the smallest goes first, the largest is paused first."""
        return -self.priority, self.arrival
