# SPDX-License-Identifier: Apache-2.0
"""An endpoint that announces new weights of the served model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from kvcache.engine import Engine
from kvcache.server.body_reader import apart, parsed, read_body
from kvcache.server.engine_loop import EngineLoop
from kvcache.server.errors import AskError
from kvcache.server.request_fields import Fields

WEIGHTS_PATH = "/v1/weights"
_FORBIDDEN = 403


class AskedWeights(Fields):
    """The body of /v1/weights."""

    model: str
    model_version: str | None = None  # None: a name that no other engine has


def add_weights(
    router: APIRouter,
    loop: EngineLoop,
    check_model: Callable[[str], None],
    *,
    max_body_bytes: int,
    trust_clients: bool,
) -> None:
    """Add `/v1/weights` to a router, which is called after the model's weights have changed."""

    @router.post(WEIGHTS_PATH)
    async def weights(request: Request) -> dict[str, Any]:
        """Start an epoch of the cache between two steps. Earlier KV is no longer used or given away."""
        body = await read_body(request, max_body_bytes)
        asked = await apart(len(body), parsed, body, AskedWeights)
        check_model(asked.model)
        if not trust_clients:
            raise AskError(
                "new weights empty the cache of all clients: expected a server that trusts its clients "
                "(`kvcache serve --trust-clients`)",
                _FORBIDDEN,
            )

        def start(engine: Engine) -> dict[str, Any]:
            cache = engine.cache.manager.cache
            cache.start_epoch(asked.model_version)
            return {"model_version": cache.model_version, "epoch": cache.epoch}

        try:
            return await loop.ask(start)
        except ValueError as error:
            raise AskError(str(error), param="model_version") from None
