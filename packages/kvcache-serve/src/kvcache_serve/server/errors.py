# SPDX-License-Identifier: Apache-2.0
"""Request errors, which are returned as OpenAI error objects."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvcache.checks import shown
from kvcache_serve.server.admission import Busy
from kvcache_serve.server.engine_loop import EngineError

CLOSED = 499  # status for disconnected clients, which never receive it
CONTEXT_CODE = "context_length_exceeded"  # OpenAI's error code for prompts that are too long
_SECONDS_TO_RETRY = 1  # retry delay in seconds, sent to clients if too many requests are waiting

# Status -> (type, code), for errors without a more specific code.
_KINDS = {
    400: ("invalid_request_error", "invalid_value"),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    409: ("invalid_request_error", "conflict"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("server_error", "service_unavailable"),
}


class AskError(Exception):
    """Raised for a request that cannot be served.

    Args:
        message: One line that names the field, its value and the expected value.
        status: The HTTP status.
        headers: Additional headers of the response.
        param: Path of the invalid field in the body, such as `messages[0].role`.
        code: A short machine-readable name of the error. None: the name of the status.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        headers: dict[str, str] | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers, self.param, self.code = status, headers, param, code


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error response, in the format that OpenAI's clients expect."""
    unknown = "invalid_request_error" if status < 500 else "server_error"
    kind, usual_code = _KINDS.get(status, (unknown, "internal_error" if status >= 500 else "error"))
    return {"error": {"message": message, "type": kind, "param": param, "code": code or usual_code}}


def add_error_handlers(app: FastAPI) -> None:
    """Make the application return an error object for every error in an endpoint and for unknown
    paths.
    """

    @app.exception_handler(AskError)
    async def refuse(_: Request, error: AskError) -> Response:
        return _refusal(str(error), error.status, error.headers, error.param, error.code)

    @app.exception_handler(EngineError)
    async def report(_: Request, error: EngineError) -> Response:
        return _refusal(str(error), error.status)

    @app.exception_handler(Busy)
    async def send_away(_: Request, error: Busy) -> Response:
        return _refusal(str(error), 429, {"retry-after": str(_SECONDS_TO_RETRY)})

    @app.exception_handler(ClientDisconnect)
    async def forget(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLOSED)

    @app.exception_handler(HTTPException)
    async def refuse_http(request: Request, error: HTTPException) -> Response:
        asked = f"{request.method} {shown(request.url.path)[1:-1]}"
        message = f"{asked}: {error.detail}, expected a path and method of /openapi.json"
        return _refusal(message, error.status_code, error.headers)


def _refusal(
    message: str,
    status: int,
    headers: Any = None,
    param: str | None = None,
    code: str | None = None,
) -> Response:
    body = error_body(message, status, param, code)
    return JSONResponse(body, status_code=status, headers=headers)
