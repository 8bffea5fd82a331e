"""How OpenAI's API writes an answer: whole, or as chunks of a stream."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from lightserve.http_server.answer import Answer
from lightserve.http_server.error_reply import error_body
from lightserve.http_server.events import merge_events, num_tokens
from lightserve.http_server.openai_bodies import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    CompletionChoice,
    OpenAIReply,
    StreamOptions,
    Usage,
    make_usage,
)
from lightserve.http_server.sse import DONE, sse_event
from lightserve.ipc.messages import ErrorInfo, TextEvent


class ReplyHead(msgspec.Struct, frozen=True):
    """What every chunk of one reply repeats, and the prompts' share of its usage.

    Usage counts a prompt once, as its first choice met it; choice i is of prompt ``i // choices_per_prompt``.
    """

    id: str
    object: str
    created: int
    model: str
    num_prompt_tokens: int
    choices_per_prompt: int

    def reply(self, choices: Any, usage: Usage | msgspec.UnsetType = msgspec.UNSET) -> OpenAIReply:
        """Put a reply or a chunk together."""
        return OpenAIReply(self.id, self.object, self.created, self.model, choices, usage)


def whole_chat(head: ReplyHead, answers: list[Answer]) -> OpenAIReply:
    """Make the reply of an unstreamed chat."""
    choices = [ChatChoice(i, ChatMessage(answer.text), answer.finish_reason) for i, answer in enumerate(answers)]
    return head.reply(choices, _usage_of(head, answers))


def whole_completion(head: ReplyHead, answers: list[Answer]) -> OpenAIReply:
    """Make the reply of an unstreamed completion."""
    choices = [CompletionChoice(i, answer.text, answer.finish_reason) for i, answer in enumerate(answers)]
    return head.reply(choices, _usage_of(head, answers))


def _usage_of(head: ReplyHead, answers: list[Answer]) -> Usage:
    num_cached = sum(answer.cached_len for answer in answers[:: head.choices_per_prompt])
    return make_usage(head.num_prompt_tokens, num_cached, sum(answer.num_tokens for answer in answers))


class OpenAIStreamFormat(ABC):
    """Writes a stream of chunks, each with one choice, and ``[DONE]`` at the end.

    A stream that fails ends with an error event and without ``[DONE]``.

    Args:
        head: The same in all chunks.
        options: The client's, or the defaults.
    """

    def __init__(self, head: ReplyHead, options: StreamOptions) -> None:
        self._head = head
        self._options = options
        self._num_cached = 0
        self._num_generated = 0

    def write(self, events: list[TextEvent], first_req_id: int) -> bytes:
        """Write what has come."""
        chunks = []
        for event in merge_events(events):
            index = event.req_id - first_req_id
            self._num_generated += num_tokens(event)
            if index % self._head.choices_per_prompt == 0:
                self._num_cached += event.cached_len
            chunks += [self._chunk(choice) for choice in self._choices_of(event, index)]
        return b"".join(chunks)

    def end(self) -> bytes:
        """Write the usage, if it is wanted, and the end."""
        if not self._options.include_usage:
            return DONE
        return sse_event(self._head.reply([], self._usage())) + DONE

    def error(self, error: ErrorInfo) -> bytes:
        """Write an error event."""
        return sse_event(error_body(error))

    def _chunk(self, choice: ChatChunkChoice | CompletionChoice) -> bytes:
        usage = self._usage() if self._options.continuous_usage_stats else msgspec.UNSET
        return sse_event(self._head.reply([choice], usage))

    def _usage(self) -> Usage:
        return make_usage(self._head.num_prompt_tokens, self._num_cached, self._num_generated)

    @abstractmethod
    def _choices_of(self, event: TextEvent, index: int) -> list[Any]:
        """Make the chunks' choices of one event of choice ``index``."""


class ChatStreamFormat(OpenAIStreamFormat):
    """Chunks of a chat: the role first, then text, then an empty delta with the finish reason."""

    def __init__(self, head: ReplyHead, options: StreamOptions) -> None:
        super().__init__(head, options)
        self._introduced: set[int] = set()

    def _choices_of(self, event: TextEvent, index: int) -> list[ChatChunkChoice]:
        choices = []
        if index not in self._introduced:
            self._introduced.add(index)
            choices.append(ChatChunkChoice(index, ChatDelta("assistant", "")))
        if event.text:
            choices.append(ChatChunkChoice(index, ChatDelta(content=event.text)))
        if event.finish_reason is not None:
            choices.append(ChatChunkChoice(index, ChatDelta(), event.finish_reason))
        return choices


class CompletionStreamFormat(OpenAIStreamFormat):
    """Chunks of a completion: text, the last with the finish reason."""

    def _choices_of(self, event: TextEvent, index: int) -> list[CompletionChoice]:
        if not event.text and event.finish_reason is None:
            return []
        return [CompletionChoice(index, event.text, event.finish_reason)]


class ReplyKind(NamedTuple):
    """One of the two routes: its names, and how it writes."""

    id_prefix: str
    object: str
    chunk_object: str
    stream_format: type[OpenAIStreamFormat]
    whole: Callable[[ReplyHead, list[Answer]], OpenAIReply]


CHAT = ReplyKind("chatcmpl", "chat.completion", "chat.completion.chunk", ChatStreamFormat, whole_chat)
COMPLETION = ReplyKind("cmpl", "text_completion", "text_completion", CompletionStreamFormat, whole_completion)
