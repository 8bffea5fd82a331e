"""FastAPI with request bodies in its schema: they are decoded by msgspec, so FastAPI itself knows nothing of them."""

from typing import Any

import msgspec
from fastapi import FastAPI

from lightserve.http_server.generate import GenerateRequest
from lightserve.http_server.info import DetokenizeRequest, TokenizeRequest, TokensRequest
from lightserve.http_server.openai_bodies import ChatRequest, CompletionRequest

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/generate": GenerateRequest,
    "/generate_stream": GenerateRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokens": TokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


class DocumentedApp(FastAPI):
    """What ``/openapi.json`` and ``/docs`` show."""

    def openapi(self) -> dict[str, Any]:
        """Return the schema of all routes, bodies included."""
        schema = super().openapi()
        bodies, components = msgspec.json.schema_components(
            _BODIES.values(), ref_template="#/components/schemas/{name}"
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        for path, body in zip(_BODIES, bodies, strict=True):
            content = {"application/json": {"schema": body}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        return schema
