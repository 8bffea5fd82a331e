"""One shape for every error, on every route: OpenAI's error object.

``{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}``. Messages are short and never repeat the
client's text; the one exception is the name of an unknown field, if it is short.
"""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from lightserve.errors import RequestError
from lightserve.ipc.messages import ErrorInfo

RETRY_AFTER_S = "1"
INTERNAL_ERROR = ErrorInfo(500, "internal_error", "The server met an error of its own.")

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


class ErrorObject(msgspec.Struct, frozen=True):
    """What went wrong, for people (``message``) and for programs (``type``, ``param``, ``code``)."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error reply, and the payload of an error event in a stream."""

    error: ErrorObject


def error_body(error: RequestError | ErrorInfo) -> ErrorBody:
    """Say ``error`` in the shape that clients know."""
    param = error.param if isinstance(error, RequestError) else None
    return ErrorBody(ErrorObject(error.message, _type_of(error.status), param, error.code))


def error_reply(error: RequestError | ErrorInfo, headers: Mapping[str, str] | None = None) -> Response:
    """Make the reply for ``error``; 429 and 503 say when to come again."""
    retry = {"Retry-After": RETRY_AFTER_S} if error.status in (429, 503) else {}
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=error.status,
        headers={**retry, **(headers or {})},
        media_type="application/json",
    )


def _type_of(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
