"""A request's body: read up to a bound, decoded once, into a struct that says exactly what is allowed.

Rules for every route:
  * The body is a JSON object whatever the content type says (``curl -d`` sends a form type).
  * ``null`` means absent. Unknown fields are refused by name. Numbers are not strings, booleans are not numbers, and an
    integer has no fraction.
"""

from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from lightserve.errors import RequestError
from lightserve.http_server.fields import invalid_field
from lightserve.http_server.limits import (
    LARGE_BODY_BYTES,
    MAX_BODY_BYTES,
    MAX_BODY_CONTAINERS,
    MAX_OPEN_BODY_BYTES,
)

T = TypeVar("T", bound=msgspec.Struct)

_TOO_LARGE, _SERVER_BUSY = "request_too_large", "server_busy"
BODY_NOT_READ = frozenset({_TOO_LARGE, _SERVER_BUSY})  # codes of errors that leave the rest of a body unread


class Bodies:
    """Reads requests' bodies, and bounds what those being read hold together."""

    def __init__(self) -> None:
        self._open_bytes = 0

    async def read(self, request: Request, body_type: type[T]) -> T:
        """Read and decode a request's body.

        Raises:
            RequestError: 413, it is larger than ``MAX_BODY_BYTES``; 503, it is large and there are too many such; 400,
                it is wrong, with the field's name, or the client left.
        """
        return decode_body(await self._read_bytes(request), body_type)

    async def _read_bytes(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
            raise _too_large()
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                self._open_bytes += len(chunk)
                self._check(len(body))
        except ClientDisconnect:
            raise RequestError("The client left.", code="client_left") from None  # nobody reads this
        finally:
            self._open_bytes -= len(body)
        return bytes(body)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        if num_bytes > LARGE_BODY_BYTES and self._open_bytes > MAX_OPEN_BODY_BYTES:
            raise RequestError("Too many large request bodies are being read.", status=503, code=_SERVER_BUSY)


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
        raise invalid_field(str(error), body_type) from None
    except msgspec.DecodeError:
        raise RequestError("The request body is not valid JSON in UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.", code="invalid_json") from None


def _too_large() -> RequestError:
    return RequestError(f"The request body is larger than {MAX_BODY_BYTES} bytes.", status=413, code=_TOO_LARGE)
