"""Prompts from a ShareGPT file: the first two turns of each conversation, under the usual filter."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from benchmark.prompt import Prompt
from benchmark.tokens import TokenCounter

_MIN_TOKENS = 4
# Texts far beyond the limit are not worth a tokenizer's time; plain text has about 4 characters to a token.
_CHARS_PER_TOKEN = 50


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[msgspec.Raw]


@dataclass(frozen=True)
class LengthFilter:
    """Which conversations are kept.

    Attributes:
        max_prompt_len: Most tokens of the prompt.
        max_total_len: Most tokens of prompt and answer together.
        output_len: Asked of every prompt in place of its own answer's length; None: the answer's.
    """

    max_prompt_len: int
    max_total_len: int
    output_len: int | None


class _SkipError(Exception):
    """Why a conversation is left out."""


def load_sharegpt(
    path: Path, num_prompts: int, seed: int, lengths: LengthFilter, counter: TokenCounter
) -> tuple[list[Prompt], Counter[str]]:
    """Sample prompts from a file of conversations.

    Args:
        num_prompts: Most prompts to return.
        seed: Of the order in which conversations are looked at.

    Returns:
        The prompts, and how many of the conversations looked at were left out, by reason.

    Raises:
        ValueError: The file is not a JSON list.
    """
    try:
        conversations = msgspec.json.decode(path.read_bytes(), type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a JSON list of conversations: {error}") from error
    prompts: list[Prompt] = []
    skipped: Counter[str] = Counter()
    for index in np.random.default_rng(seed).permutation(len(conversations)):
        if len(prompts) == num_prompts:
            break
        try:
            prompts.append(_make_prompt(conversations[index], lengths, counter))
        except _SkipError as reason:
            skipped[str(reason)] += 1
    return prompts, skipped


def _make_prompt(raw: msgspec.Raw, lengths: LengthFilter, counter: TokenCounter) -> Prompt:
    question, answer = _first_turns(raw)
    if len(question) > _CHARS_PER_TOKEN * lengths.max_prompt_len:
        raise _SkipError("prompt too long")
    if len(answer) > _CHARS_PER_TOKEN * lengths.max_total_len and lengths.output_len is None:
        raise _SkipError("prompt and answer too long")
    prompt_len = counter.count(question)
    output_len = lengths.output_len or counter.count(answer)
    if prompt_len < _MIN_TOKENS or (output_len < _MIN_TOKENS and lengths.output_len is None):
        raise _SkipError("prompt or answer too short")
    if prompt_len > lengths.max_prompt_len:
        raise _SkipError("prompt too long")
    if prompt_len + output_len > lengths.max_total_len:
        raise _SkipError("prompt and answer too long")
    return Prompt(question, prompt_len, output_len)


def _first_turns(raw: msgspec.Raw) -> tuple[str, str]:
    try:
        turns = msgspec.json.decode(raw, type=_Conversation).conversations
        if len(turns) < 2:
            raise _SkipError("fewer than two turns")
        question, answer = (msgspec.json.decode(turn, type=_Turn).value for turn in turns[:2])
    except msgspec.DecodeError as error:
        raise _SkipError("malformed") from error
    if not question.strip() or not answer.strip():
        raise _SkipError("empty text")
    return question, answer
