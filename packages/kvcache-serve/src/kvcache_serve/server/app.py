# SPDX-License-Identifier: Apache-2.0
"""The HTTP application, with OpenAI's completion and chat completion endpoints, metrics, and the cache
page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from kvcache import __version__
from kvcache.checks import check_name, flag, instance
from kvcache_exchange.disaggregation import Connector
from kvcache_exchange.disaggregation.offer_calls import offer_key
from kvcache_serve.server.admission import Admission
from kvcache_serve.server.authorization import check_key, key_check
from kvcache_serve.server.completions import Completions
from kvcache_serve.server.engine_loop import EngineLoop
from kvcache_serve.server.errors import add_error_handlers
from kvcache_serve.server.limits import Limits
from kvcache_serve.server.metrics import metrics_text
from kvcache_serve.server.prefill import add_prefill
from kvcache_serve.server.request_log import RequestLog
from kvcache_serve.server.snapshot import sanitizer_reports
from kvcache_serve.server.texts import Texts

if TYPE_CHECKING:
    from kvcache_exchange.peers import PeerSource


def make_app(
    loop: EngineLoop,
    texts: Texts,
    model_name: str,
    *,
    limits: Limits | None = None,
    trust_clients: bool = False,
    connector: Connector | None = None,
    peers: PeerSource | None = None,
    transfer_secret: bytes = b"",
    api_key: str | None = None,
) -> FastAPI:
    """Create the application for `Server` or another ASGI server. The application runs `loop`.

    Args:
        loop: The engine loop. It must not have been started.
        texts: Tokenizes prompts and decodes answers.
        model_name: The model name that requests must use.
        limits: Limits of requests. Only `Server` enforces the limits on connections.
        trust_clients: Whether requests may set `cache_salt` and `priority`, send hints (`/v1/kv_hints`),
            or announce new weights (`/v1/weights`), which are otherwise rejected. With these, a
            client could share another client's cache by using its salt, jump ahead of other clients
            by setting a priority, keep its own blocks by pins, or empty the cache.
        connector: A `Connector` among the engine's sources. If given, other servers can have this
            server prefill prompts (`/prefill`), and then load the prompts' KV.
        peers: A `PeerSource` among the engine's sources. If given, other servers can load prefixes
            that this server has cached (`/peer`). The loop must have a publisher, because the other
            servers read its events.
        transfer_secret: The secret of the transports. If given, only servers with the same secret can
            use `/prefill` and `/peer`, and their `cache_salt` is accepted.
        api_key: The key that `/v1/...` requires. Other paths do not require a key, because they do
            not reveal prompts or answers. None: no key is required.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A name is empty, no header can carry the key, `peers` is given without a publisher,
            or `connector` or `peers` is given with `api_key` and without `transfer_secret`, so that no
            key would protect their endpoints.
    """
    limits = Limits() if limits is None else limits
    instance(loop, EngineLoop, "loop")
    check_name(model_name, "model_name")
    instance(limits, Limits, "limits")
    flag(trust_clients, "trust_clients")
    if connector is not None:
        instance(connector, Connector, "connector")
    instance(transfer_secret, bytes, "transfer_secret")
    if peers is not None:
        # Imported here, because it requires the packages of `kvcache_exchange.router_events`.
        from kvcache_exchange.peers import PeerSource
        from kvcache_serve.server.peers import add_peers

        instance(peers, PeerSource, "peers")
        if loop.publisher is None:
            raise ValueError("peers is given: expected a loop with a publisher")
    if api_key is not None:
        check_key(api_key, "api_key")
        for name, value in (("connector", connector), ("peers", peers)):
            if value is not None and not transfer_secret:
                raise ValueError(
                    f"api_key is given with {name}: expected transfer_secret as well, because other "
                    "servers do not send the API key"
                )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop.start()
        try:
            yield
        finally:
            await asyncio.to_thread(loop.stop)

    # FastAPI's documentation pages are disabled, because they load scripts from the internet.
    app = FastAPI(
        title="kvcache", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    admission = Admission(loop.engine.scheduler.max_num_rows, limits.max_waiting)
    log = RequestLog()
    app.state.loop, app.state.admission, app.state.limits = loop, admission, limits
    add_error_handlers(app)
    endpoints = Completions(loop, texts, model_name, admission, log, limits, trust_clients)
    entry = {
        **{"id": model_name, "object": "model", "created": 0, "owned_by": "kvcache"},
        "max_model_len": loop.engine.cache.plan.max_model_len,
    }
    guarded = APIRouter(dependencies=[] if api_key is None else [Depends(key_check(api_key))])

    @guarded.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await endpoints.complete(request)

    @guarded.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await endpoints.chat(request)

    @guarded.post("/v1/kv_hints")
    async def kv_hints(request: Request) -> dict[str, Any]:
        return await endpoints.hint(request)

    @guarded.post("/v1/weights")
    async def weights(request: Request) -> dict[str, Any]:
        return await endpoints.new_weights(request)

    @guarded.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @guarded.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        endpoints.check_model(name)
        return entry

    app.include_router(guarded)
    check = key_check(
        offer_key(transfer_secret), "the key of this peer", "the same KVCACHE_TRANSFER_SECRET"
    )
    between_servers = APIRouter(dependencies=[Depends(check)] if transfer_secret else [])
    trusts_servers = trust_clients or bool(transfer_secret)
    most = endpoints.max_body_bytes
    if connector is not None:
        add_prefill(
            *(between_servers, loop, connector, admission),
            max_body_bytes=most,
            trust_clients=trusts_servers,
        )
    if peers is not None:
        add_peers(
            *(between_servers, loop, peers, loop.publisher, admission),
            max_body_bytes=most,
            trusts_salts=trusts_servers,
        )
    app.include_router(between_servers)

    @app.get("/health")
    async def health() -> Response:
        """Return status 200, or 503 if the server is shutting down or its engine has failed."""
        loop.check()
        admission.check_open()
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        text = metrics_text(model_name, loop, admission, log)
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.get("/state")
    async def state() -> Response:
        """Return the state of the cache, as the page shows it."""
        found = loop.state | {"model": model_name}
        if peers is not None:
            found["peers"] = peers.errors
        return JSONResponse(found)

    @app.get("/kvcache/sanitizer")
    async def sanitizer() -> Response:
        """Return the counts and reports of the KV cache sanitizer."""
        return JSONResponse(sanitizer_reports(loop.engine, loop.state))

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(files("kvcache_serve.server").joinpath("page.html").read_text())

    return app
