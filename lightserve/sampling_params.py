"""How one request chooses its tokens: plain values, checked by the HTTP server before anything is queued."""

import msgspec

MAX_STOP_TOKEN_IDS = 64


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """One request's sampling parameters, complete: every default has been filled in.

    Attributes:
        max_new_tokens: At least 1; already clamped so that prompt and answer fit ``max_req_total_len``.
        temperature: 0 means greedy.
        top_p: In (0, 1]; 1 turns it off.
        top_k: 0 turns it off.
        min_p: In [0, 1); 0 turns it off.
        repetition_penalty: Over prompt and output; 1 turns it off.
        presence_penalty: Over output only; 0 turns it off.
        frequency_penalty: Over output only; 0 turns it off.
        seed: Always concrete: the HTTP server draws one when the client gives none. In [0, 2**63).
        min_new_tokens: Until so many are produced, end-of-sequence and stop ids are never sampled.
        stop_token_ids: At most ``MAX_STOP_TOKEN_IDS`` of the client's own, besides the model's end-of-sequence ids.
        ignore_eos: The model's end-of-sequence ids do not end this request.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def has_penalties(self) -> bool:
        """Whether what the request has seen changes its logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
