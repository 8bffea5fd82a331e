import socket

import pytest

from lightserve.errors import ConfigError
from lightserve.listener import base_url, listen


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]

        with pytest.raises(ConfigError, match=f"--port {port} is already in use"):
            listen("127.0.0.1", port)


def test_a_port_can_be_listened_on_again_at_once() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server, _ = first.accept()
            server.close()  # the closing side keeps the address in TIME_WAIT
            client.recv(1)

    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7", "a" * 70 + ".b"])
def test_a_wrong_host_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {host}"):
        listen(host, 0)


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:"), ("::1", "http://[::1]:")]
)
def test_the_url_is_one_that_this_machine_can_reach(host: str, url: str) -> None:
    with listen(host, 0) as listener:
        assert base_url(listener) == f"{url}{listener.getsockname()[1]}"
