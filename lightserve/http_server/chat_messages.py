"""Messages as clients send them, in the form that a chat template expects.

Content arrives as text or as a list of parts; a template reads text, or loops over parts. Only an assistant's message
may have none, when it calls tools. Arguments of tool calls arrive as JSON text; templates read a mapping.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from lightserve.errors import RequestError

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class ContentForm:
    """What a template does with the content of one role's messages."""

    reads_text: bool
    reads_parts: bool


def check_contents(messages: list[Message]) -> None:
    """Check that every message says something: without content it would silently be an empty text.

    Raises:
        RequestError: A message has no content, and is no assistant's that calls tools.
    """
    for index, message in enumerate(messages):
        calls_tools = message.get("role") == "assistant" and message.get("tool_calls")
        if message.get("content") is None and not calls_tools:
            raise RequestError(
                f"messages[{index}] has no `content`. Only an assistant's message with `tool_calls` needs none.",
                code="invalid_value",
                param="messages",
            )


def adapt_message(message: Message, form_of: Callable[[str], ContentForm]) -> Message:
    """Return a message as the template expects it.

    Args:
        message: As the client sent it, with its content checked.
        form_of: The form of content that the template reads in messages of a role.

    Raises:
        RequestError: Content is neither text nor text parts, or a tool call's arguments are not a JSON object.
    """
    adapted = {**message, "content": _adapt_content(message, form_of(str(message.get("role"))))}
    if message.get("tool_calls"):
        adapted["tool_calls"] = [_adapt_tool_call(call) for call in _list(message["tool_calls"], "tool_calls")]
    return adapted


def _adapt_content(message: Message, form: ContentForm) -> str | list[Message] | None:
    content = message.get("content")
    if content is None:
        return None  # templates tell a bare tool call by it
    if isinstance(content, str):
        return content if form.reads_text or not form.reads_parts else [_text_part(content)]
    texts = [_text_of(part) for part in _list(content, "content")]
    return [_text_part(text) for text in texts] if form.reads_parts else "".join(texts)


def _text_part(text: str) -> Message:
    return {"type": "text", "text": text}


def _text_of(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            raise RequestError("This model reads text only: every content part must be of type text.", param="messages")


def _adapt_tool_call(call: Any) -> Message:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise RequestError("A tool call must be an object with a function.", param="messages")
    function = call["function"]
    if "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": _mapping(function["arguments"])}}


def _mapping(arguments: Any) -> Message:
    if arguments in (None, "", "null"):
        return {}
    try:
        if isinstance(arguments, str):
            return msgspec.json.decode(arguments, type=Message)
        return msgspec.convert(arguments, Message)
    except msgspec.MsgspecError:
        raise RequestError("The arguments of a tool call must be a JSON object.", param="messages") from None


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{name} of a message is of the wrong type.", param="messages")
    return value
