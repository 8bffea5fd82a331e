"""The HTTP server's listening socket, made by the launcher so that a port in use fails before anything is loaded."""

import errno
import socket

from lightserve.errors import ConfigError
from lightserve.http_server.limits import CONNECT_BACKLOG


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address.

    Raises:
        ConfigError: Names ``--port`` or ``--host`` and says what is wrong with it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(CONNECT_BACKLOG)  # at once: until somebody listens, another server could bind the port, too
    except OSError as error:
        listener.close()
        raise _explain(error, host, port) from error
    return listener


def _explain(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"--port {port} is already in use on {host}")
    if error.errno == errno.EACCES:
        return ConfigError(f"--port {port}: not permitted to listen on it")
    return ConfigError(f"--host {host}: {error.strerror}")


def base_url(listener: socket.socket) -> str:
    """Where this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
