# SPDX-License-Identifier: Apache-2.0
"""Endpoints through which other servers load prefixes that this server has cached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from kvcache.checks import MAX_INT32
from kvcache_exchange.peers import PeerSource
from kvcache_exchange.peers.source import OFFER_PATH
from kvcache_exchange.peers.watch import PEER_PATH
from kvcache_exchange.router_events import EventPublisher
from kvcache_serve.engine import Engine
from kvcache_serve.server.admission import Admission
from kvcache_serve.server.body_reader import apart, parsed, read_body, refuse_untrusted
from kvcache_serve.server.engine_loop import EngineLoop

_Token = Annotated[int, Field(ge=0, le=MAX_INT32)]


class AskedOffer(BaseModel):
    """The body of a request for an offer, in the format that `PeerSource` sends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[list[_Token], Field(min_length=1)]
    min_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)]
    cache_salt: Annotated[str, Field(min_length=1)] | None = None


def add_peers(
    router: APIRouter,
    loop: EngineLoop,
    peers: PeerSource,
    publisher: EventPublisher,
    admission: Admission,
    *,
    max_body_bytes: int,
    trusts_salts: bool,
) -> None:
    """Add the endpoints for peers to a router. `peers` is a source of the loop's engine."""
    # A longer prompt cannot have a longer cached prefix.
    most = loop.engine.cache.plan.max_model_len - 1

    @router.get(PEER_PATH)
    async def describe() -> Response:
        loop.check()
        admission.check_open()
        events = {
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "topic": publisher.topic,
        }
        return JSONResponse(peers.describe() | {"events": events})

    @router.post(OFFER_PATH)
    async def offer(request: Request) -> Response:
        admission.check_open()
        body = await read_body(request, max_body_bytes)
        asked = await apart(len(body), parsed, body, AskedOffer)
        if not trusts_salts:
            refuse_untrusted(asked, ("cache_salt",))

        def offered(engine: Engine) -> Mapping[str, Any] | None:
            _finish_steps(engine)
            return peers.offer(
                asked.prompt[:most], min_tokens=asked.min_tokens, cache_salt=asked.cache_salt
            )

        return JSONResponse({"offer": await loop.ask(offered)})


def _finish_steps(engine: Engine) -> None:
    """Wait until the KV of all launched steps is in memory."""
    device = engine.cache.storages[0].device
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
