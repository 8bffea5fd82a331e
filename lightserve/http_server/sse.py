"""Server-sent events: one line of JSON each, a blank line after it, nothing else.

Some clients take U+2028, U+2029 or U+0085 for the end of a line, so these are escaped in the JSON as well.
"""

import re
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx gives the whole answer at once
]

_encode = msgspec.json.Encoder().encode
_LINE_ENDS = re.compile(rb"\xe2\x80[\xa8\xa9]|\xc2\x85")
_ESCAPES = {b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029", b"\xc2\x85": b"\\u0085"}


def sse_event(payload: Any) -> bytes:
    """Encode one event as OpenAI's clients expect it, with the space."""
    return b"data: " + _one_line(payload) + b"\n\n"


def lightllm_event(payload: Any) -> bytes:
    """Encode one event as LightLLM writes it, without the space."""
    return b"data:" + _one_line(payload) + b"\n\n"


def _one_line(payload: Any) -> bytes:
    raw = _encode(payload)
    return raw if raw.isascii() else _LINE_ENDS.sub(lambda found: _ESCAPES[found[0]], raw)
