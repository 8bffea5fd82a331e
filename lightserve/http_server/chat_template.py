"""Conversations to prompts, through the model's own Jinja template, as Hugging Face transformers renders it.

The template alone says what surrounds a chat: no BOS is added to what it prints.
"""

import datetime
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from lightserve.errors import ConfigError, RequestError
from lightserve.http_server.chat_messages import ContentForm, Message, adapt_message, check_contents
from lightserve.http_server.mark_guard import MarkGuard
from lightserve.tokenizer import Tokenizer

# What a template's own code can run into with messages it was not made for; any other exception is a bug of ours.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_MAX_ERROR_CHARS = 500

_FIRST_WORD, _SECOND_WORD, _UNREAD_KEY = "lightserveprobea", "lightserveprobeb", "lightserveprobekey"


class ChatTemplate:
    """Renders and encodes conversations. Threads may share it.

    Args:
        source: The Jinja template.
        tokenizer: Encodes, and lends its BOS and other tokens to the template.

    Raises:
        ConfigError: The template is not valid Jinja.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template is broken in line {error.lineno}: {error.message}") from error
        self._special_tokens = tokenizer.special_tokens
        self._guard = MarkGuard(tokenizer)
        self._forms: dict[str, ContentForm] = {}
        for role in ("user", "system", "assistant", "tool"):
            self._forms[role] = self._probe(role)

    def render(self, messages: list[Message]) -> str:
        """Render a conversation up to where the model's answer begins.

        Raises:
            RequestError: A message is wrong, or the template refuses them; the text says why.
        """
        masked, mask = self._guard.mask(self._adapt(messages))
        return self._guard.unmask(self._render(masked), mask)

    def encode_chat(self, messages: list[Message]) -> list[int]:
        """Encode a conversation up to where the model's answer begins.

        Special tokens come from the template alone; written inside a message they are ordinary text.

        Raises:
            RequestError: A message is wrong, or the template refuses them; the text says why.
        """
        masked, mask = self._guard.mask(self._adapt(messages))
        return self._guard.encode(self._render(masked), mask)

    def _adapt(self, messages: list[Message]) -> list[Message]:
        check_contents(messages)
        return [adapt_message(message, self._form_of) for message in messages]

    def _form_of(self, role: str) -> ContentForm:
        return self._forms.get(role, self._forms["user"])

    def _render(self, messages: list[Message]) -> str:
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except _RENDER_ERRORS as error:
            text = str(error)[:_MAX_ERROR_CHARS]
            raise RequestError(f"The model's chat template refused the messages: {text}", param="messages") from error

    def _probe(self, role: str) -> ContentForm:
        """Find out what the template reads by rendering both forms: it prints the words, and nothing else of a part."""
        text = _FIRST_WORD + _SECOND_WORD
        parts = [{"type": "text", "text": word, _UNREAD_KEY: ""} for word in (_FIRST_WORD, _SECOND_WORD)]
        return ContentForm(reads_text=self._prints(role, text), reads_parts=self._prints(role, parts))

    def _prints(self, role: str, content: Any) -> bool:
        try:
            rendered = self._render(self._conversation(role, content))
        except RequestError:
            return False
        return _FIRST_WORD in rendered and _SECOND_WORD in rendered and _UNREAD_KEY not in rendered

    def _conversation(self, role: str, content: Any) -> list[Message]:
        """Return the shortest proper conversation that has a message of ``role``."""
        message = {"role": role, "content": content}
        if role == "user":
            return [message]
        user = adapt_message({"role": "user", "content": "Hi"}, self._form_of)
        call = {"id": "call00000", "type": "function", "function": {"name": "now", "arguments": {}}}
        return {
            "system": [message, user],
            "assistant": [user, message],
            "tool": [user, {"role": "assistant", "content": None, "tool_calls": [call]}, message],
        }[role]


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is: Jinja's own filter would escape characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}`` marks the model's words for training; here it only prints them."""

    tags = {"generation"}  # noqa: RUF012 # the base class's own form

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
