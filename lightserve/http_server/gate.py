"""What every request passes before the routes: cross-origin rules, then the key."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightserve.errors import RequestError
from lightserve.http_server.error_reply import error_reply
from lightserve.http_server.info import HEALTH_PATHS

_ALLOW_ORIGIN = (b"access-control-allow-origin", b"*")
_PREFLIGHT_HEADERS = [
    _ALLOW_ORIGIN,
    (b"access-control-allow-methods", b"GET, HEAD, POST, OPTIONS"),
    # The wildcard does not cover authorization.
    (b"access-control-allow-headers", b"authorization, content-type, *"),
    (b"access-control-max-age", b"86400"),
]


class Cors:
    """Lets pages of any origin ask, and read every reply, errors too. No cookies: the key is the only credential."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight; add the header to everything else."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            await send({"type": "http.response.start", "status": 204, "headers": _PREFLIGHT_HEADERS})
            await send({"type": "http.response.body"})
        else:
            await self._app(scope, receive, lambda message: send(_with_origin(message)))


class ApiKeyGate:
    """Asks for the key on every path but the health routes, spelt exactly.

    Args:
        app: What is behind the gate.
        api_key: The key; None: there is none, and everything passes.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        # Bytes of the command line that are no UTF-8 arrive as lone surrogates.
        self._key = None if api_key is None else api_key.encode(errors="surrogateescape")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or answer 401."""
        if self._key is None or scope["type"] != "http" or scope["path"] in HEALTH_PATHS or self._fits(scope):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            "This server needs a key: send `Authorization: Bearer <key>`.", status=401, code="invalid_api_key"
        )
        await error_reply(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _fits(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Header text is latin-1; the key may be any Unicode.
        given = key.strip().encode("latin-1")
        return scheme.lower() == "bearer" and self._key is not None and hmac.compare_digest(given, self._key)


def _with_origin(message: Message) -> Message:
    if message["type"] == "http.response.start":
        message["headers"] = [*message.get("headers", []), _ALLOW_ORIGIN]
    return message
