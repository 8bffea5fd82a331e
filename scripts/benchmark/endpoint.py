"""Where the server is, and short questions to it."""

import http.client
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

_ANSWER_LIMIT_S = 30.0


class ServerError(Exception):
    """The server could not be asked, or answered with an error status."""


@dataclass(frozen=True)
class Endpoint:
    """A server's base URL, taken apart."""

    host: str
    port: int
    prefix: str
    tls: bool

    @classmethod
    def parse(cls, base_url: str) -> "Endpoint":
        """Take a base URL apart; a closing ``/v1`` is accepted and dropped.

        Raises:
            ValueError: It is not an http or https URL.
        """
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or url.hostname is None:
            raise ValueError(f"--base_url must look like http://127.0.0.1:8000, not {base_url!r}")
        tls = url.scheme == "https"
        prefix = url.path.rstrip("/").removesuffix("/v1")
        return cls(url.hostname, url.port or (443 if tls else 80), prefix, tls)

    @property
    def authority(self) -> str:
        """Host and port as they stand in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return what a connection needs for TLS; None for plain HTTP."""
        return ssl.create_default_context() if self.tls else None


class ServerQueries:
    """Blocking JSON requests over one kept connection, for what must be known before the load starts.

    A context manager, which closes that connection.
    """

    def __init__(self, endpoint: Endpoint, api_key: str | None) -> None:
        self._prefix = endpoint.prefix
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=_ANSWER_LIMIT_S)
        context = endpoint.ssl_context()
        if context is not None:
            self._connection = http.client.HTTPSConnection(
                endpoint.host, endpoint.port, timeout=_ANSWER_LIMIT_S, context=context
            )

    def __enter__(self) -> "ServerQueries":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def get(self, path: str) -> Any:
        """GET a path.

        Raises:
            ServerError: No answer, an error status, or an answer that is not JSON.
        """
        return self._ask("GET", path, None)

    def post(self, path: str, body: Any) -> Any:
        """POST a body to a path.

        Raises:
            ServerError: No answer, an error status, or an answer that is not JSON.
        """
        return self._ask("POST", path, msgspec.json.encode(body))

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        try:
            self._connection.request(method, self._prefix + path, body, self._headers)
            reply = self._connection.getresponse()
            raw = reply.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServerError(f"{method} {path}: {error}") from error
        if reply.status != 200:
            raise ServerError(f"{method} {path}: status {reply.status}: {raw[:200]!r}")
        try:
            return msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise ServerError(f"{method} {path}: not JSON: {raw[:200]!r}") from error
