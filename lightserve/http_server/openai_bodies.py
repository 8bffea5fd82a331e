"""Bodies of OpenAI's API: what may be asked, and what is answered.

Besides OpenAI's parameters these are taken: ``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``,
``stop_token_ids``, ``ignore_eos``, ``skip_special_tokens``, ``priority``, ``timeout``, ``cache_salt``, and
``stream_options.continuous_usage_stats``. Parameters
that cannot change the answer (``user``, ``metadata``, …) are accepted and ignored; those that would, and that we do not
support yet, are refused unless they hold their harmless value.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lightserve.errors import RequestError
from lightserve.http_server.fields import Unread
from lightserve.http_server.limits import MAX_CHOICES, MAX_PROMPTS
from lightserve.http_server.prompts import Messages
from lightserve.http_server.sampling_fields import Limit, SamplingFields, Stops

UNSUPPORTED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

UNSUPPORTED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "logit_bias": ({},),
    "logprobs": (),
    "suffix": ("",),
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream tells besides text.

    Attributes:
        include_usage: One more chunk before the end, with usage and no choices.
        continuous_usage_stats: Usage so far in every chunk.
        include_obfuscation: Ignored; chunks are never padded.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class OpenAIRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of request share.

    ``max_completion_tokens`` and ``max_tokens`` are two names of one limit; when both are given the first counts.
    """

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    logit_bias: Unread = UNSET
    logprobs: Unread = UNSET
    # Ignored:
    metadata: Unread = UNSET
    prompt_cache_key: Unread = UNSET
    prompt_cache_retention: Unread = UNSET
    safety_identifier: Unread = UNSET
    service_tier: Unread = UNSET
    store: Unread = UNSET
    user: Unread = UNSET


class ChatRequest(OpenAIRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/chat/completions``."""

    messages: Messages
    parallel_tool_calls: Unread = UNSET  # ignored: without tools there are no calls
    audio: Unread = UNSET
    function_call: Unread = UNSET
    functions: Unread = UNSET
    modalities: Unread = UNSET
    prediction: Unread = UNSET
    reasoning_effort: Unread = UNSET
    response_format: Unread = UNSET
    tool_choice: Unread = UNSET
    tools: Unread = UNSET
    top_logprobs: Unread = UNSET
    verbosity: Unread = UNSET
    web_search_options: Unread = UNSET


class CompletionRequest(OpenAIRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/completions``: one prompt or several, each as text or as ids."""

    prompt: str | Annotated[list[int | str | list[int]], Meta(min_length=1)]
    best_of: Unread = UNSET
    echo: Unread = UNSET
    suffix: Unread = UNSET

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one.

        Raises:
            RequestError: Texts, ids and lists of ids are mixed, or there are too many prompts.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if len({type(item) for item in self.prompt}) > 1:
            raise RequestError("Prompts must be all texts or all ids.", code="invalid_value", param="prompt")
        ids = [item for item in self.prompt if isinstance(item, int)]
        if ids:
            return [ids]
        if len(self.prompt) > MAX_PROMPTS:
            raise RequestError(f"At most {MAX_PROMPTS} prompts.", code="invalid_value", param="prompt")
        return [item for item in self.prompt if not isinstance(item, int)]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt tokens, those that the prefix cache held already."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one HTTP request: each prompt once, and every id generated, an end-of-sequence id included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def make_usage(num_prompt_tokens: int, num_cached: int, num_generated: int) -> Usage:
    """Add up."""
    details = PromptTokensDetails(num_cached)
    return Usage(num_prompt_tokens, num_generated, num_prompt_tokens + num_generated, details)


class ChatMessage(msgspec.Struct, frozen=True):
    """The model's turn."""

    content: str
    role: Literal["assistant"] = "assistant"


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: None = None


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the model's turn. Fields are absent, never null."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: None = None


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer of a completion, or its part of a chunk."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: None = None


class OpenAIReply(msgspec.Struct, frozen=True):
    """A whole reply, or one chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of ``/v1/models``."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: Literal["lightserve"] = "lightserve"


class ModelList(msgspec.Struct, frozen=True):
    """The reply of ``/v1/models``."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
