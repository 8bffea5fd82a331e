"""Prompts: text, messages or ids to checked ids. Text work runs in threads: no large prompt holds up the others.

The tokenizer adds what the model expects before a bare text (such as BOS); a chat template brings its own. A prompt has
at least one token and leaves room for at least one more.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeAlias, TypeVar

from msgspec import Meta

from lightserve.errors import RequestError
from lightserve.http_server.limits import MAX_MESSAGES, MIN_DETOKENIZED_IDS, max_prompt_chars
from lightserve.http_server.status import Status
from lightserve.ipc.messages import Int32s, pack_int32
from lightserve.tokenizer import Tokenizer

Messages: TypeAlias = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
T = TypeVar("T")

# Two threads keep one long prompt from delaying all short ones; more would only fight for the interpreter.
_NUM_THREADS = 2


class Prompts:
    """Makes prompts.

    Args:
        tokenizer: The model's.
        encode_chat: Renders messages through the chat template and encodes the result; None: the model has none.
        vocab_size: Rows of the model's embedding; prompt ids are below it.
        status: Holds the limit on prompt and answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        encode_chat: Callable[[Messages], list[int]] | None,
        vocab_size: int,
        status: Status,
    ) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._encode_chat = encode_chat
        self._status = status
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    async def encode_text(self, text: str, param: str) -> list[int]:
        """Encode a text.

        Raises:
            RequestError: It is far too long, or not valid Unicode.
        """
        self._check_chars(len(text), param)
        return await self._in_thread(lambda: self._tokenizer.encode(text, add_special_tokens=True))

    async def encode_messages(self, messages: Messages, param: str) -> list[int]:
        """Encode a conversation.

        Raises:
            RequestError: It is too long, the template refuses it, or there is none.
        """
        encode_chat = self._encode_chat
        if encode_chat is None:
            raise RequestError(
                "This model has no chat template. Use /v1/completions or /generate, or start the server with a model "
                "folder whose tokenizer_config.json or chat_template.jinja holds one.",
                code="no_chat_template",
            )

        def encode() -> list[int]:
            self._check_chars(_num_chars(messages), param)
            return encode_chat(messages)

        return await self._in_thread(encode)

    async def decode(self, token_ids: list[int]) -> str:
        """Decode ids, special tokens included.

        Raises:
            RequestError: There are too many, or one is not in the vocabulary.
        """
        limit = max(MIN_DETOKENIZED_IDS, self._status.max_req_total_len)
        if len(token_ids) > limit:
            raise RequestError(f"At most {limit} ids.", code="invalid_value", param="tokens")
        return await self._in_thread(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def check(self, token_ids: list[int], param: str) -> Int32s:
        """Return the ids of a prompt that can run.

        Raises:
            RequestError: It is empty, too long for an answer to fit, or an id is not in the vocabulary.
        """
        limit = self._status.max_req_total_len
        if not token_ids:
            raise RequestError("The prompt has no tokens.", code="empty_prompt", param=param)
        if len(token_ids) >= limit:
            raise RequestError(
                f"The prompt has {len(token_ids)} tokens, but prompt and answer together have at most {limit}.",
                code="context_length_exceeded",
                param=param,
            )
        if not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise RequestError(f"Token ids must be in [0, {self.vocab_size}).", code="invalid_value", param=param)
        return pack_int32(token_ids)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a mark rather than text."""
        return token_id in self._tokenizer.special_ids

    def close(self) -> None:
        """End the threads, without waiting for what they still do."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_chars(self, num_chars: int, param: str) -> None:
        limit = max_prompt_chars(self._status.max_req_total_len)
        if num_chars > limit:
            raise RequestError(
                f"The prompt has {num_chars} characters; more than {limit} cannot fit the "
                f"{self._status.max_req_total_len} tokens that prompt and answer may have.",
                code="context_length_exceeded",
                param=param,
            )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _num_chars(value: Any) -> int:
    """Count the characters of all strings inside; not recursive, as a client may nest deeper than Python can call."""
    total = 0
    left = [value]
    while left:
        match left.pop():
            case str(text):
                total += len(text)
            case dict(mapping):
                left += [*mapping.keys(), *mapping.values()]
            case list(items):
                left += items
            case _:
                pass
    return total
