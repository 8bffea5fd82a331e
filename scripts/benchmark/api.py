"""The API families: how a request is written, and what the events of its stream mean."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmark.prompt import Prompt


class Answer:
    """What the server has said so far in answer to one request.

    Attributes:
        num_events: Events that brought output: text, or tokens whose text is not complete yet.
        has_text: Some text has come.
        output_tokens: By the server's usage.
        prompt_tokens: By the server's usage.
        finished: The server said that the answer is complete.
        finish_reason: Why, where it said so.
        error: What an error event said.
    """

    __slots__ = ("error", "finish_reason", "finished", "has_text", "num_events", "output_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.num_events = 0
        self.has_text = False
        self.output_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.finished = False
        self.finish_reason: str | None = None
        self.error: str | None = None


@dataclass(frozen=True)
class Sampling:
    """What every request asks for, besides its length."""

    temperature: float
    ignore_eos: bool


@dataclass(frozen=True)
class ApiFamily:
    """One way to ask for a streamed completion.

    Attributes:
        path: Where to POST.
        write_body: The JSON body of a prompt, for a model of that name.
        read_event: Takes the data of one event into an answer; raises ``msgspec.DecodeError`` when it is malformed.
        takes_ids: Prompts may be token ids.
        needs_model: The body must name the model.
    """

    path: str
    write_body: Callable[[Prompt, Sampling, str], dict[str, Any]]
    read_event: Callable[[bytes, Answer], None]
    takes_ids: bool
    needs_model: bool


class _Token(msgspec.Struct):
    text: str = ""
    count_output_tokens: int | None = None
    prompt_tokens: int | None = None


class _TokenEvent(msgspec.Struct):
    token: _Token | None = None
    finished: bool = False
    finish_reason: str | None = None
    error: Any = None


_token_event = msgspec.json.Decoder(_TokenEvent)


def _write_generate(prompt: Prompt, sampling: Sampling, model: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {"max_new_tokens": prompt.output_len, "do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        parameters["temperature"] = sampling.temperature
    if sampling.ignore_eos:
        parameters["ignore_eos"] = True
    return {"inputs": prompt.content(), "parameters": parameters}


def _read_generate(data: bytes, answer: Answer) -> None:
    event = _token_event.decode(data)
    if event.error is not None:
        answer.error = _error_text(event.error)
        return
    if event.token is not None:
        _take_token(event.token, answer)
    if event.finished:
        answer.finished = True
        answer.finish_reason = event.finish_reason


def _take_token(token: _Token, answer: Answer) -> None:
    if token.prompt_tokens is not None:
        answer.prompt_tokens = token.prompt_tokens
    if token.text:
        answer.has_text = True
    # The closing event may bring only held-back text: the count says whether there was a token.
    if token.count_output_tokens is None or token.count_output_tokens != answer.output_tokens:
        answer.num_events += 1
    answer.output_tokens = token.count_output_tokens


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


_chunk = msgspec.json.Decoder(_Chunk)


def _write_completion(prompt: Prompt, sampling: Sampling, model: str) -> dict[str, Any]:
    return {"prompt": prompt.content(), **_openai_options(prompt, sampling, model)}


def _write_chat(prompt: Prompt, sampling: Sampling, model: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt.content()}]
    return {"messages": messages, **_openai_options(prompt, sampling, model)}


def _openai_options(prompt: Prompt, sampling: Sampling, model: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": model,
        "max_tokens": prompt.output_len,
        "temperature": sampling.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.ignore_eos:
        # Beyond OpenAI's API, but every engine has both. Special tokens would otherwise leave answers without text.
        options |= {"ignore_eos": True, "skip_special_tokens": False}
    return options


def _read_openai(data: bytes, answer: Answer) -> None:
    if data == b"[DONE]":
        answer.finished = True
        return
    chunk = _chunk.decode(data)
    if chunk.error is not None or chunk.object == "error":
        answer.error = _error_text(chunk.error if chunk.error is not None else chunk.message)
        return
    for choice in chunk.choices:
        _take_choice(choice, answer)
    if chunk.usage is not None:
        answer.output_tokens = chunk.usage.completion_tokens
        answer.prompt_tokens = chunk.usage.prompt_tokens


def _take_choice(choice: _Choice, answer: Answer) -> None:
    text, opens = choice.text, False
    if choice.delta is not None:
        delta = choice.delta
        text, opens = delta.content or delta.reasoning_content or delta.reasoning, delta.role is not None
    if text:
        answer.has_text = True
        answer.num_events += 1
    elif not opens and choice.finish_reason is None:
        answer.num_events += 1  # a token whose character is not complete yet
    if choice.finish_reason is not None:
        answer.finished = True
        answer.finish_reason = choice.finish_reason


def _error_text(error: Any) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)


API_FAMILIES = {
    "lightserve": ApiFamily("/generate_stream", _write_generate, _read_generate, takes_ids=True, needs_model=False),
    "openai-completions": ApiFamily(
        "/v1/completions", _write_completion, _read_openai, takes_ids=True, needs_model=True
    ),
    "openai-chat": ApiFamily("/v1/chat/completions", _write_chat, _read_openai, takes_ids=False, needs_model=True),
}
