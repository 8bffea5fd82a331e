"""Who may ask: the key, and pages of other origins."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightserve.http_server.info import HEALTH_PATHS
from tests.lightserve.http_server.live_server import LiveServer, live_server

KEY = "sécret"
ORIGIN = (b"origin", b"https://page.example")
PATHS = [
    "/generate",
    "/generate_stream",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/tiny",
    "/tokens",
    "/tokenize",
    "/detokenize",
    "/token_load",
    "/get_server_info",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/nope",
    "//health",
    "/health/",
    "/Health",
    "//generate",
    "/generate/",
    "/%68ealth/x",
]


@pytest.fixture(scope="module")
def locked_server(model_dir: Path) -> Iterator[LiveServer]:
    with live_server(model_dir, api_key=KEY) as server:
        yield server


def bearer(key: str, scheme: str = "Bearer") -> tuple[bytes, bytes]:
    return (b"authorization", f"{scheme} {key}".encode())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "authorization", [None, b"", b"Bearer", b"Bearer wrong", KEY.encode(), b"Basic \xff", b"\xff\xfe"]
)
def test_only_the_key_opens_a_route(
    locked_server: LiveServer, path: str, method: str, authorization: bytes | None
) -> None:
    headers = [] if authorization is None else [(b"authorization", authorization)]
    response = locked_server.client.request(method, path, headers=headers, content=b"{}")
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_key_opens_every_route(locked_server: LiveServer, scheme: str) -> None:
    response = locked_server.client.post("/generate", headers=[bearer(KEY, scheme)], json={"inputs": "hi"})
    assert response.json()["generated_text"] == ["Hello"]


@pytest.mark.parametrize("path", sorted(HEALTH_PATHS))
def test_health_needs_no_key(locked_server: LiveServer, path: str) -> None:
    assert locked_server.client.get(path).status_code == 200
    assert locked_server.client.head(path).status_code == 200


@pytest.mark.parametrize("path", [*PATHS, "/health"])
def test_a_preflight_is_allowed_without_a_key(locked_server: LiveServer, path: str) -> None:
    wanted = [(b"access-control-request-method", b"POST"), (b"access-control-request-headers", b"authorization")]
    for headers in ([ORIGIN], [ORIGIN, *wanted]):
        response = locked_server.client.options(path, headers=headers)
        assert response.status_code == 204
        assert response.headers["access-control-allow-origin"] == "*"
        assert "authorization" in response.headers["access-control-allow-headers"]
        assert "POST" in response.headers["access-control-allow-methods"]


def test_every_reply_may_be_read_by_other_origins(locked_server: LiveServer) -> None:
    client = locked_server.client
    replies = [
        client.post("/generate", headers=[ORIGIN, bearer("wrong")], json={"inputs": "hi"}),
        client.post("/generate", headers=[ORIGIN, bearer(KEY)], json={"inputs": 5}),
        client.post("/generate_stream", headers=[ORIGIN, bearer(KEY)], json={"inputs": "hi"}),
        client.get("/nope", headers=[ORIGIN, bearer(KEY)]),
    ]
    assert [reply.status_code for reply in replies] == [401, 400, 200, 404]
    assert all(reply.headers["access-control-allow-origin"] == "*" for reply in replies)
