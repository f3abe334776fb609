# SPDX-License-Identifier: Apache-2.0
"""Sources from which a simulated replica loads tokens, besides its own tiers."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.allocator import KVCacheManager, Request
from kvcache.events import CacheEvent
from kvcache_lab.stored import SimulatedStore


class StoreAndPeers:
    """A source that combines a store and other replicas. The source with more tokens is used. If
    both have equally many tokens, the replica is used.

    Attributes:
        link: The link of the last match, "store" or "peer".
    """

    is_optional = True

    def __init__(
        self,
        manager: KVCacheManager,
        store: SimulatedStore | None,
        peer_tokens: Callable[[Request, float], int],
    ) -> None:
        self._manager, self._store, self._peer_tokens = manager, store, peer_tokens
        self.link = "store"

    def match(self, request: Request, now_ms: float = 0.0) -> int:
        """Return the number of tokens after the hit that can be loaded at `now_ms`."""
        num_stored = 0 if self._store is None else self._store.match(request, now_ms)
        cache, size = self._manager.cache, max(self._manager.block_sizes)
        most = (request.num_tokens - 1) // size * size
        cached = min(self._peer_tokens(request, now_ms), most)
        num_at_peer = max(cached - cache.cached_tokens(request).with_host, 0)
        self.link = "peer" if num_at_peer and num_at_peer >= num_stored else "store"
        return max(num_stored, num_at_peer)

    def load(self, request: Request, num_hit: int, num_tokens: int) -> None:
        """Record a use of the stored blocks, if the tokens are loaded from the store."""
        if self.link == "store":
            self._store.load(request, num_hit, num_tokens)

    def save(self) -> None:
        """Store the blocks that were cached in the last step."""
        if self._store is not None:
            self._store.save()

    def complete(self, ready_ms: float) -> None:
        """Set the completion time of the blocks that were stored since the last call."""
        if self._store is not None:
            self._store.complete(ready_ms)

    def drain_events(self) -> list[CacheEvent]:
        """Return the events of the manager since the last call."""
        return (self._manager.cache if self._store is None else self._store).drain_events()


class ComputedPrompts:
    """The source of a decode replica. It provides all tokens of a prompt except the last one."""

    is_optional = False
    link = "transfer"

    def __init__(self, manager: KVCacheManager) -> None:
        self._cache = manager.cache

    def match(self, request: Request, now_ms: float = 0.0) -> int:
        """Return the number of tokens after the hit, excluding the prompt's last token."""
        return max(request.num_tokens - 1 - self._cache.cached_tokens(request).with_host, 0)

    def load(self, request: Request, num_hit: int, num_tokens: int) -> None:
        """Do nothing."""

    def save(self) -> None:
        """Do nothing."""

    def complete(self, ready_ms: float) -> None:
        """Do nothing."""

    def drain_events(self) -> list[CacheEvent]:
        """Return the events of the manager."""
        return self._cache.drain_events()
