"""The web application: routes, the gate before them, and one shape for every error."""

from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from lightserve.errors import RequestError
from lightserve.http_server.body import BODY_NOT_READ
from lightserve.http_server.documented_app import DocumentedApp
from lightserve.http_server.error_reply import INTERNAL_ERROR, error_reply
from lightserve.http_server.front_end import FrontEnd
from lightserve.http_server.gate import ApiKeyGate, Cors
from lightserve.http_server.generate import generate_routes
from lightserve.http_server.info import info_routes
from lightserve.http_server.openai import openai_routes


def build_app(front: FrontEnd, *, api_key: str | None, server_info: dict[str, Any]) -> FastAPI:
    """Build the application.

    Args:
        front: The process's state.
        api_key: The key that clients must send; None: none.
        server_info: What ``/get_server_info`` tells, without secrets.
    """
    app = DocumentedApp(title="lightserve", redirect_slashes=False)
    app.include_router(generate_routes(front))
    app.include_router(openai_routes(front))
    app.include_router(info_routes(front, server_info))
    app.add_exception_handler(RequestError, _reply_to_request_error)
    app.add_exception_handler(HTTPException, _reply_to_http_exception)
    app.add_exception_handler(Exception, _reply_to_bug)
    app.add_middleware(ApiKeyGate, api_key=api_key)
    app.add_middleware(Cors)  # added last, so outermost
    return app


async def _reply_to_request_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestError):
        raise error
    # With the rest of the body still to come the connection is of no further use.
    return error_reply(error, {"Connection": "close"} if error.code in BODY_NOT_READ else None)


async def _reply_to_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    message = "There is no such route." if error.status_code == 404 else f"{error.detail}."
    return error_reply(RequestError(message, status=error.status_code, code=code), error.headers)


async def _reply_to_bug(request: Request, error: Exception) -> Response:
    return error_reply(INTERNAL_ERROR, {"Connection": "close"})  # which is what uvicorn does after an exception
