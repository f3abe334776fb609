# SPDX-License-Identifier: Apache-2.0
"""An endpoint that prefills prompts for other servers, which then load the prompts' KV."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from kvcache_exchange.disaggregation import Connector
from kvcache_exchange.disaggregation.prefill import PREFILL_PATH
from kvcache_serve.engine import SamplingParams
from kvcache_serve.server.admission import Admission
from kvcache_serve.server.body_reader import apart, parsed, read_body, refuse_untrusted
from kvcache_serve.server.engine_loop import EngineError, EngineLoop
from kvcache_serve.server.errors import CLOSED, AskError

_CONFLICT, _UNAVAILABLE = 409, 503


class AskedPrefill(BaseModel):
    """The body of a /prefill request, in the format that `RemotePrefill` sends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[list[int], Field(min_length=1)]
    peer: dict[str, Any]
    cache_salt: Annotated[str, Field(min_length=1)] | None = None


def add_prefill(
    router: APIRouter,
    loop: EngineLoop,
    connector: Connector,
    admission: Admission,
    *,
    max_body_bytes: int,
    trust_clients: bool,
) -> None:
    """Add `/prefill` to a router. `connector` is a source of the loop's engine."""

    @router.post(PREFILL_PATH)
    async def prefill(request: Request) -> Response:
        admission.check()
        body = await read_body(request, max_body_bytes)
        asked = await apart(len(body), parsed, body, AskedPrefill)
        if not trust_clients:
            refuse_untrusted(asked, ("cache_salt",))
        try:
            connector.check_peer(asked.peer)
        except ValueError as error:
            raise AskError(str(error), _CONFLICT) from None
        params = SamplingParams(max_tokens=1)
        try:
            loop.engine.check(asked.prompt, params)
        except (TypeError, ValueError) as error:
            raise AskError(str(error)) from None
        computing = asyncio.ensure_future(_offer_of(loop, connector, admission, asked, params))
        try:
            while not computing.done():
                await asyncio.wait([computing], timeout=0.1)
                if await request.is_disconnected():
                    return Response(status_code=CLOSED)
            return JSONResponse({"offer": computing.result()})
        finally:
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)


async def _offer_of(
    loop: EngineLoop,
    connector: Connector,
    admission: Admission,
    asked: AskedPrefill,
    params: SamplingParams,
) -> Mapping[str, Any]:
    offers: list[Mapping[str, Any] | None] = []
    async with (
        admission.rows(1, is_first=True, priority=0),
        loop.serving(
            asked.prompt,
            params,
            cache_salt=asked.cache_salt,
            free=lambda request: offers.append(connector.publish(request)),
        ) as answer,
    ):
        async for delta in answer:
            if delta.error is not None:
                raise EngineError(f"{delta.error}")
    if not offers or offers[0] is None:
        raise EngineError(
            "the prompt's KV cannot be offered: too many leases, or the weights changed meanwhile",
            _UNAVAILABLE,
        )
    return offers[0]
