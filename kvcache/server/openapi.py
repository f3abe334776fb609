# SPDX-License-Identifier: Apache-2.0
"""The server's OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvcache.server.errors import ErrorAnswer
from kvcache.server.hints import AskedHints
from kvcache.server.prompts import AskedText, AskedTokens
from kvcache.server.request_fields import AskedChat, AskedCompletion, AskedWeights

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": AskedCompletion,
    "/v1/chat/completions": AskedChat,
    "/v1/kv_hints": AskedHints,
    "/v1/weights": AskedWeights,
    "/tokenize": AskedTokens,
    "/detokenize": AskedText,
}
_SCHEMAS = "#/components/schemas/"


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the document, including schemas that FastAPI does not generate: those of error
    objects, and those of request bodies that endpoints parse themselves.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models = [*_BODIES.values(), ErrorAnswer]
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template=_SCHEMAS + "{model}"
    )
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas["$defs"])
    error = {"$ref": f"{_SCHEMAS}{ErrorAnswer.__name__}"}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # invalid fields cause status 400 instead
            operation["responses"]["default"] = _json(error) | {"description": "An error."}
            if path in _BODIES:
                body = {"$ref": f"{_SCHEMAS}{_BODIES[path].__name__}"}
                operation["requestBody"] = _json(body) | {"required": True}
    return document


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
