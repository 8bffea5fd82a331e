"""OpenAI's API: ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``.

The model: absent, or the served name; any other is a 404 that says the name. ``stream_options`` without ``stream`` is
refused. Several prompts with n choices each give choices in the order of the prompts. See openai_bodies.py for the
parameters, sampling_fields.py for their rules.
"""

import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from lightserve.errors import RequestError
from lightserve.http_server.choice import Choice
from lightserve.http_server.front_end import FrontEnd
from lightserve.http_server.limits import MAX_PROMPTS
from lightserve.http_server.openai_bodies import (
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    ChatRequest,
    CompletionRequest,
    ModelCard,
    ModelList,
    OpenAIRequest,
    StreamOptions,
)
from lightserve.http_server.openai_formats import CHAT, COMPLETION, ReplyHead, ReplyKind
from lightserve.http_server.replies import StreamedReply, WholeReply, json_reply
from lightserve.http_server.sampling_fields import for_choice
from lightserve.http_server.unsupported import refuse_unsupported


def openai_routes(front: FrontEnd) -> APIRouter:
    """Make the routes."""
    router = APIRouter(prefix="/v1")

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        with front.metrics.counting_failures():
            front.status.check_serving()
            body = await front.bodies.read(request, ChatRequest)
            _check(front, body, UNSUPPORTED_IN_CHAT)
            ids = await front.prompts.encode_messages(body.messages, "messages")
            choices = _choices(front, body, ids, "messages", first_index=0)
            return _reply(front, CHAT, body, choices)

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        with front.metrics.counting_failures():
            front.status.check_serving()
            body = await front.bodies.read(request, CompletionRequest)
            _check(front, body, UNSUPPORTED_IN_COMPLETIONS)
            choices = await _choices_of_prompts(front, body)
            return _reply(front, COMPLETION, body, choices)

    @router.get("/models")
    async def models() -> Response:
        """List the one served model."""
        return json_reply(ModelList([_card(front)]))

    @router.get("/models/{model:path}")
    async def model(model: str) -> Response:
        """Describe the served model."""
        _check_model(front, model)
        return json_reply(_card(front))

    return router


async def _choices_of_prompts(front: FrontEnd, body: CompletionRequest) -> list[Choice]:
    prompts = body.prompts()
    n = body.n or 1
    if len(prompts) * n > MAX_PROMPTS:
        raise RequestError(f"Prompts times n may be at most {MAX_PROMPTS}.", code="invalid_value", param="n")
    choices: list[Choice] = []
    for prompt in prompts:
        ids = await front.prompts.encode_text(prompt, "prompt") if isinstance(prompt, str) else prompt
        choices += _choices(front, body, ids, "prompt", first_index=len(choices))
    return choices


def _choices(front: FrontEnd, body: OpenAIRequest, ids: list[int], param: str, *, first_index: int) -> list[Choice]:
    prompt_ids = front.prompts.check(ids, param)
    params = body.sampling_params(
        max_new_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        min_new_tokens=body.min_tokens,
        greedy=body.greedy,
        room=front.status.max_req_total_len - len(ids),
        vocab_size=front.prompts.vocab_size,
    )
    text = body.text_params(body.stop, params, "stop")
    return [body.choice(prompt_ids, for_choice(params, first_index + i), text) for i in range(body.n or 1)]


def _reply(front: FrontEnd, kind: ReplyKind, body: OpenAIRequest, choices: list[Choice]) -> Response:
    head = ReplyHead(
        id=f"{kind.id_prefix}-{secrets.token_hex(16)}",
        object=kind.chunk_object if body.stream else kind.object,
        created=int(time.time()),
        model=front.model_name,
        num_prompt_tokens=sum(choice.num_prompt_tokens for choice in choices[:: body.n or 1]),
        choices_per_prompt=body.n or 1,
    )
    if body.stream:
        return StreamedReply(front.streams, choices, kind.stream_format(head, body.stream_options or StreamOptions()))
    return WholeReply(front.streams, choices, partial(kind.whole, head))


def _check(front: FrontEnd, body: OpenAIRequest, unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    if body.model is not None:
        _check_model(front, body.model)
    if body.stream_options is not None and not body.stream:
        raise RequestError("`stream_options` needs `stream`: true.", code="invalid_value", param="stream_options")
    refuse_unsupported(body, unsupported)


def _check_model(front: FrontEnd, model: str) -> None:
    if model != front.model_name:
        raise RequestError(
            f"There is no such model here. The served model is `{front.model_name}`.",
            status=404,
            code="model_not_found",
            param="model",
        )


def _card(front: FrontEnd) -> ModelCard:
    return ModelCard(front.model_name, front.created, front.status.max_req_total_len)
