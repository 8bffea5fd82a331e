"""Routes about the server rather than for generation: health, load, limits, tokens, metrics.

* ``/liveness``: 200 while the process answers.
* ``/readiness`` and ``/health``: 200 when requests are taken and answered; 503 while starting, draining or down, and
  when requests have been open for 20 s, or four times the longest step of late, without a sign of life of the engine.
"""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from lightserve.errors import RequestError
from lightserve.http_server.fields import Unread
from lightserve.http_server.front_end import FrontEnd
from lightserve.http_server.metrics import CONTENT_TYPE
from lightserve.http_server.prompts import Messages
from lightserve.http_server.replies import json_reply

HEALTH_PATHS = frozenset({"/health", "/readiness", "/liveness"})


class TokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/tokens``; ``parameters`` do not change the count."""

    text: str
    parameters: Unread = UNSET


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/tokenize``: a prompt or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    model: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/detokenize``."""

    tokens: list[int]
    model: str | None = None


def info_routes(front: FrontEnd, server_info: dict[str, Any]) -> APIRouter:
    """Make the routes; ``server_info`` is what ``/get_server_info`` tells."""
    router = APIRouter()

    @router.head("/readiness", include_in_schema=False)
    @router.head("/health", include_in_schema=False)
    @router.get("/readiness")
    @router.get("/health")
    async def health() -> Response:
        """Say whether requests are taken and answered."""
        _check_health(front)
        return json_reply({"status": "ok"})

    @router.head("/liveness", include_in_schema=False)
    @router.get("/liveness")
    async def liveness() -> Response:
        """Say that this process answers."""
        return json_reply({"status": "ok"})

    @router.post("/tokens")
    async def tokens(request: Request) -> Response:
        """Count a text's tokens."""
        body = await front.bodies.read(request, TokensRequest)
        return json_reply({"ntokens": len(await front.prompts.encode_text(body.text, "text"))})

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Encode a prompt or a conversation as a generation request would."""
        ids = await _encode(front, await front.bodies.read(request, TokenizeRequest))
        return json_reply({"tokens": ids, "count": len(ids), "max_model_len": front.status.max_req_total_len})

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Decode ids."""
        body = await front.bodies.read(request, DetokenizeRequest)
        return json_reply({"prompt": await front.prompts.decode(body.tokens)})

    @router.get("/token_load")
    async def token_load() -> Response:
        """Say how full the pool is, as shares of it."""
        return json_reply(_token_load(front))

    @router.get("/get_server_info")
    async def get_server_info() -> Response:
        """Tell settings and limits."""
        limits = {
            "max_total_token_num": front.status.max_total_token_num,
            "max_req_total_len": front.status.max_req_total_len,
        }
        return json_reply({**server_info, **limits, "served_model_name": front.model_name})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Show Prometheus metrics."""
        return Response(front.metrics.exposition(), media_type=CONTENT_TYPE)

    return router


def _check_health(front: FrontEnd) -> None:
    front.status.check_serving()
    stall_s = front.streams.stall_s()
    if stall_s:
        raise RequestError(
            f"Requests are open, but the engine has been silent for {stall_s:.0f} s.",
            status=503,
            code="engine_stalled",
        )


async def _encode(front: FrontEnd, body: TokenizeRequest) -> list[int]:
    if body.messages is not None and body.prompt is None:
        return await front.prompts.encode_messages(body.messages, "messages")
    if body.prompt is not None and body.messages is None:
        return await front.prompts.encode_text(body.prompt, "prompt")
    raise RequestError("Give either `prompt` or `messages`.", code="invalid_value")


def _token_load(front: FrontEnd) -> dict[str, float]:
    load = front.status.load
    if load is None:
        return {"current_load": 0.0, "logical_max_load": 0.0, "dynamic_max_load": 0.0}
    return {
        "current_load": load.used_slots / load.max_total_token_num,
        "logical_max_load": load.requested_slots / load.max_total_token_num,
        "dynamic_max_load": load.promised_slots / load.max_total_token_num,
    }
