"""A request's body: read up to a bound, decoded once, into a struct that says exactly what is allowed.

Rules for every route:
  * The body is a JSON object whatever the content type says (``curl -d`` sends a form type).
  * ``null`` means absent. Unknown fields are refused by name. Numbers are not strings, booleans are not numbers, and an
    integer has no fraction.
"""

import re
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import Raw, UnsetType
from starlette.requests import ClientDisconnect, Request

from lightserve.errors import RequestError
from lightserve.http_server.limits import MAX_BODY_BYTES, MAX_BODY_CONTAINERS

T = TypeVar("T")

# The type of fields that are not read, or hardly: their values are never built.
Unread: TypeAlias = Raw | UnsetType

_MAX_MESSAGE_CHARS = 300
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[\w.-]{1,64})`")
_PATH = re.compile(r" - at `\$\.(?P<path>\w{1,64}(?:\.\w{1,64})*)")


async def read_body(request: Request) -> bytes:
    """Read the whole body, or stop as soon as it is too large.

    Raises:
        RequestError: 413, the body is larger than ``MAX_BODY_BYTES``; 400, the client left while it was being read.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise _too_large()
    except ClientDisconnect:
        raise RequestError("The client left.", code="client_left") from None  # nobody reads this
    return bytes(body)


def decode_body(body: bytes, body_type: type[T]) -> T:
    """Decode and validate ``body``.

    Raises:
        RequestError: 400 that names the field, or that says that there is too much in it.
    """
    if body.count(b"{") + body.count(b"[") > MAX_BODY_CONTAINERS:  # brackets within text count, too: there is room
        raise RequestError(f"The request body has more than {MAX_BODY_CONTAINERS} objects and lists.")
    try:
        return msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except msgspec.DecodeError:
        raise RequestError("The request body is not valid JSON in UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.", code="invalid_json") from None


async def read(request: Request, body_type: type[T]) -> T:
    """Read and decode a request's body. Raises ``RequestError``: 400 or 413."""
    return decode_body(await read_body(request), body_type)


def _too_large() -> RequestError:
    # The rest of the body stays unread, so the connection cannot carry another request: see app.py.
    return RequestError(
        f"The request body is larger than {MAX_BODY_BYTES} bytes.", status=413, code="request_too_large"
    )


def _invalid_field(problem: str) -> RequestError:
    if unknown := _UNKNOWN_FIELD.search(problem):
        name = unknown["name"]
        return RequestError(f"Unknown field `{name}`.", code="unknown_field", param=name)
    if "unknown field" in problem:
        return RequestError("The request body has a field with an unknown name.", code="unknown_field")
    path = _PATH.search(problem)
    return RequestError(problem[:_MAX_MESSAGE_CHARS], code="invalid_value", param=_bare(path["path"]) if path else None)


def _bare(path: str) -> str:
    return path.removeprefix("parameters.")  # LightLLM's bodies keep the same fields one level down
