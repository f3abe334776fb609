# SPDX-License-Identifier: Apache-2.0
"""A source that requests prefills from another server and loads the resulting KV."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcache.allocator import Request
from kvcache.checks import MAX_INT64, instance, integer
from kvcache.sources import Arrived, LoadStats
from kvcache_exchange.circuit import Circuit
from kvcache_exchange.disaggregation.connector import Connector
from kvcache_exchange.disaggregation.offer_calls import OfferServer, OfferSource

PREFILL_PATH = "/prefill"


@dataclass
class PrefillStats(LoadStats):
    """The counts that a `RemotePrefill` has accumulated since it was created."""

    asked_requests: int = 0
    """Number of prompts sent to the peer for prefill."""

    unanswered_requests: int = 0
    """Number of prompts for which no offer arrived because the peer was unreachable, late, or
    failed.
    """

    unasked_requests: int = 0
    """Number of prompts not sent to the peer, because earlier prompts failed or were refused."""


class RemotePrefill(OfferSource):
    """A `KVSource` that requests prefills from another server and loads their KV with a connector.

    `match` sends the prompt to the peer's `/prefill` endpoint and returns None until the peer's
    offer arrives. The KV is then loaded in the same way as by `Connector`. Each request is sent
    once. A prompt is computed locally if the peer is unreachable, is late or refuses, if fewer than
    `min_tokens` of its tokens are missing from the local cache, if it has inputs other than tokens, or
    if the request has `read_cache=False`.

    Args:
        connector: The connector of the engine that loads the KV.
        address: HTTP address of the peer, as "HOST:PORT".
        timeout_s: Maximum time in seconds to wait for an offer, including the peer's prefill.
        min_tokens: Minimum number of tokens after the local hit for which a prompt is sent to the
            peer.
        circuit: Circuit breaker that decides when to retry a failing peer.
        secret: The secret of both servers' transports, if they have one.

    Raises:
        ValueError: `address` is not HOST:PORT, or a number is out of range.
    """

    name = "prefill"

    def __init__(
        self,
        connector: Connector,
        address: str,
        *,
        timeout_s: float = 10.0,
        min_tokens: int = 32,
        circuit: Circuit | None = None,
        secret: bytes = b"",
    ) -> None:
        super().__init__(connector)
        self._server = OfferServer(address, timeout_s=timeout_s, circuit=circuit, secret=secret)
        self._min_tokens = integer(min_tokens, "min_tokens", 1, MAX_INT64)

    @property
    def stats(self) -> PrefillStats:
        """Counts since the source was created."""
        return PrefillStats(**self._counts())

    def match(self, request: Request) -> int | None:
        """Return the number of tokens after the local hit that the peer has computed, or None if
        the peer has not finished.

        Raises:
            ValueError: The peer refuses, or its offer is incompatible with this engine.
        """
        instance(request, Request, "request")
        if not self._calls.knows(request):
            num_missing = request.num_tokens - 1 - self._connector.hit_tokens(request)
            if num_missing < self._min_tokens or not self._may_ask(request):
                return 0
            body = {"prompt": request.token_ids[:-1].tolist(), "peer": self._connector.describe()}
            if request.cache_salt is not None:
                body["cache_salt"] = request.cache_salt
            self._calls.ask(
                request, [self._server], lambda server: server.fetch(PREFILL_PATH, body)["offer"]
            )
        return self._calls.match(request)

    def poll(self) -> list[Arrived]:
        """Return the loads that have ended since the last call, and free the blocks of ended leases.

        Their tokens do not count as cached, because the peer prefilled them for the request.
        """
        return [replace(arrived, are_cached=False) for arrived in super().poll()]
