# SPDX-License-Identifier: Apache-2.0
"""A source that loads prefixes that other engines have cached."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.allocator import KVCacheManager, Request
from kvcache.checks import MAX_INT64, instance, integer, listed, number, shown
from kvcache.sources import LoadStats
from kvcache_exchange.disaggregation.connector import Connector
from kvcache_exchange.disaggregation.offer_calls import OfferServer, OfferSource
from kvcache_exchange.disaggregation.options import checked_seconds
from kvcache_exchange.peers.index import EventIndex
from kvcache_exchange.peers.watch import PeerWatch

OFFER_PATH = "/peer/offer"


@dataclass
class PeerStats(LoadStats):
    """Counts of a `PeerSource` since it was created."""

    asked_requests: int = 0
    """Number of requests for which an offer was requested from a peer."""

    missed_requests: int = 0
    """Number of these requests for which the peer made no offer, because it had evicted blocks that
    the index still lists, or could not keep the blocks.
    """

    unanswered_requests: int = 0
    """Number of these requests for which no offer arrived because the peer was unreachable, late, or
    failed.
    """

    unasked_requests: int = 0
    """Number of requests for which no offer was requested, because earlier requests to all peers
    that have cached the prefix failed.
    """

    offered_requests: int = 0
    """Number of peers' requests that were answered with an offer."""

    offered_tokens: int = 0
    """Number of tokens in these offers."""

    declined_requests: int = 0
    """Number of peers' requests that were answered without an offer."""


class PeerSource(OfferSource):
    """A `KVSource` that loads prefixes cached by other engines, and offers this engine's prefixes
    to them.

    For each request, `match` looks up in an index which peer has cached the longest prefix. If this
    prefix exceeds the local hit by at least `min_tokens`, the source requests an offer from the
    peer. The peer keeps the offered blocks under a lease until they are loaded. For each request,
    at most one peer receives one request for an offer. The tokens are computed locally if the peer
    is unreachable, answers too late, refuses, or no longer has the blocks.

    For each peer, a thread follows the peer's events and checks that the peer is compatible.
    Incompatible peers are logged and not used.

    Args:
        manager: The manager of this engine.
        connector: A connector for the manager. This source owns the connector and closes it.
        peers: HTTP addresses of the peers, as "HOST:PORT".
        min_tokens: Minimum number of tokens after the local hit for which an offer is requested.
        timeout_s: Maximum time in seconds to wait for an offer.
        lease_s: Duration in seconds of the leases under which blocks are kept for peers.
        max_kept_share: Maximum share of the pool that may be kept for peers, from 0 to 1.
        recheck_s: Seconds between checks of a peer.
        secret: The shared secret of all transports, if they use one.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An address is invalid or occurs twice, a number is out of range, or blocks of a
            group cannot be offered from the cache.
    """

    name = "peers"

    def __init__(
        self,
        manager: KVCacheManager,
        connector: Connector,
        peers: Sequence[str],
        *,
        min_tokens: int = 64,
        timeout_s: float = 2.0,
        lease_s: float = 10.0,
        max_kept_share: float = 0.25,
        recheck_s: float = 5.0,
        secret: bytes = b"",
    ) -> None:
        instance(manager, KVCacheManager, "manager")
        super().__init__(connector)
        self._manager = manager
        if isinstance(peers, str):
            raise TypeError(f"peers is {shown(peers)}: expected a sequence of addresses")
        peers = listed(peers, "peers", "a sequence of addresses")
        servers = [OfferServer(each, timeout_s=timeout_s, secret=secret) for each in peers]
        if len(set(peers)) < len(peers):
            raise ValueError(f"peers is {shown(peers)}: expected different addresses")
        self._min_tokens = integer(min_tokens, "min_tokens", 1, MAX_INT64)
        self._lease_s = checked_seconds(lease_s, "lease_s")
        recheck_s = checked_seconds(recheck_s, "recheck_s")
        share = number(max_kept_share, "max_kept_share")
        if not 0 <= share <= 1:
            raise ValueError(f"max_kept_share is {share}: expected 0 to 1")
        self._max_kept_blocks = int(share * manager.pool.num_total)
        self._index = EventIndex(manager)
        self._numbers, self._process = itertools.count(), uuid.uuid4().hex
        self._offered = self._offered_tokens = self._declined = 0
        self._watches = {
            server.address: PeerWatch(
                server, self._index.view(server.address), self.check_peer, recheck_s
            )
            for server in servers
        }

    @property
    def stats(self) -> PeerStats:
        """Counts since the source was created."""
        return PeerStats(
            **self._counts(),
            missed_requests=self._calls.missed,
            offered_requests=self._offered,
            offered_tokens=self._offered_tokens,
            declined_requests=self._declined,
        )

    @property
    def errors(self) -> dict[str, str | None]:
        """The reason why each peer is not used, keyed by address. None: the peer is used."""
        return {address: watch.error for address, watch in self._watches.items()}

    # Methods that serve peers.

    def describe(self) -> dict[str, Any]:
        """Return a description of this engine as JSON values, to be passed to a peer's
        `check_peer`.
        """
        return {"peer": self._connector.describe()}

    def check_peer(self, values: Mapping[str, Any]) -> None:
        """Check that this engine can load the prefixes that a peer has cached.

        Args:
            values: The result of the peer's `describe`.

        Raises:
            TypeError, ValueError: This engine and the peer differ in a value that must be equal.
                The one-line message states the difference.
        """
        instance(values, Mapping, "values")
        own, peer = self.describe(), values.get("peer")
        self._connector.check_peer(peer)
        if peer["engine_id"] == own["peer"]["engine_id"]:
            raise ValueError("the address is that of this server itself")
        mine, theirs = (each["identity"]["hashing"] or {} for each in (own["peer"], peer))
        for name in ("block_sizes", "hash_block_size"):
            if mine.get(name) != theirs.get(name):
                raise ValueError(
                    f"{name} is {mine.get(name)} here, but {shown(theirs.get(name))} in the peer: "
                    "expected equal values; set --block-size to the same in both servers"
                )

    def offer(
        self, token_ids: Sequence[int], *, min_tokens: int = 1, cache_salt: str | None = None
    ) -> dict[str, Any] | None:
        """Offer the cached prefix of a peer's prompt, and keep the prefix's blocks under a lease.

        Nothing is computed. Call this method in the manager's thread, between steps.

        Args:
            token_ids: The peer's prompt. At least its last token is not offered.
            min_tokens: Minimum number of tokens to offer.
            cache_salt: The salt of the peer's request.

        Returns:
            The offer. None if fewer than `min_tokens` tokens are cached, or if the blocks cannot be
            kept.

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        # An offer omits the last two tokens of its request, so append one token to the prompt.
        tokens = listed(token_ids, "token_ids", "a sequence of tokens")
        request = Request(
            f"peer-{self._process}-{next(self._numbers)}", [*tokens, 0], cache_salt=cache_salt
        )
        offer = self._connector.publish_cached(
            request,
            min_tokens=min_tokens,
            max_kept_blocks=self._max_kept_blocks,
            lease_s=self._lease_s,
        )
        if offer is None:
            self._declined += 1
        else:
            self._offered += 1
            self._offered_tokens += offer["num_tokens"]
        return offer

    # Methods of `KVSource`.

    def match(self, request: Request) -> int | None:
        """Return the number of tokens after the local hit that a peer offers, or None if the peer's
        reply is pending.

        Raises:
            ValueError: The peer refuses, or its offer is incompatible with this engine.
        """
        instance(request, Request, "request")
        if not self._calls.knows(request):
            self._ask(request)
        return self._calls.match(request)

    def close(self) -> None:
        """Stop following the peers, cancel all requests to them, and close the connector."""
        for watch in self._watches.values():
            watch.stop()
        for watch in self._watches.values():
            watch.join()
        super().close()

    def _ask(self, request: Request) -> None:
        """Request an offer from the peer with the longest prefix, if this prefix is long enough."""
        needed = self._connector.hit_tokens(request) + self._min_tokens
        peers: list[tuple[int, OfferServer]] = []
        if needed < request.num_tokens and self._may_ask(request):
            for peer, count in self._index.num_tokens(request).items():
                watch = self._watches.get(peer)
                if count >= needed and watch is not None and watch.error is None:
                    peers.append((count, watch.server))
        if not peers:
            self._calls.skip(request)
            return
        peers.sort(key=lambda each: -each[0])
        body = {"prompt": request.token_ids.tolist(), "min_tokens": needed}
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        self._calls.ask(
            request,
            [server for _, server in peers],
            lambda server: server.fetch(OFFER_PATH, body)["offer"],
        )
