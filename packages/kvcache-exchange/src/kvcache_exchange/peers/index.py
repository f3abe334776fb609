# SPDX-License-Identifier: Apache-2.0
"""Indexes of the prefixes that other engines have cached on their devices, fed by cache events."""

from __future__ import annotations

from kvcache.allocator import KVCacheManager, Request
from kvcache.checks import check_name, instance
from kvcache_exchange.router_events.view import CacheView
from kvcache_exchange.router_events.wire import GPU, wire_hash
from kvcache_exchange.store.prefixes import StoredPrefixes


class EventIndex:
    """Maps a request to the peers that have cached its prefix, by the block hashes in cache events.

    The result is only a hint, because a peer may have evicted blocks in the meantime. `num_tokens`
    is called in the engine's thread, while the views are updated in other threads.

    The peers must hash blocks in the same way as the manager, with equal block sizes.

    Args:
        manager: The manager of this engine. It computes the hashes of requests.

    Raises:
        ValueError: The manager has a group that cannot be filled from cached blocks.

    Example:
        >>> from kvcache_exchange.router_events.translator import EventTranslator
        >>> peer = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128, enable_events=True)
        >>> plan = peer.step(new=[Request("r1", range(40))])
        >>> index = EventIndex(KVCacheManager(16, num_gpu_blocks=9, max_model_len=128))
        >>> events = EventTranslator(peer.options.hash_seed).translate(peer.cache.drain_events())
        >>> index.view("peer").apply(events)
        >>> index.num_tokens(Request("r2", range(50)))
        {'peer': 32}
    """

    def __init__(self, manager: KVCacheManager) -> None:
        instance(manager, KVCacheManager, "manager")
        self._prefixes = StoredPrefixes(manager)
        self._views: dict[str, CacheView] = {}

    def view(self, peer: str) -> CacheView:
        """Return a peer's view, which must be updated with the peer's events."""
        check_name(peer, "peer")
        return self._views.setdefault(peer, CacheView())

    def num_tokens(self, request: Request) -> dict[str, int]:
        """Return how many leading tokens of a request each peer has cached on its device."""
        instance(request, Request, "request")
        keys = self._prefixes.candidates(request, 0)
        hashes = [wire_hash(key.block_hash) for key in keys]
        counts = {}
        for peer, view in self._views.items():
            found = [
                key
                for key, block_hash in zip(keys, hashes)
                if view.block(block_hash, GPU, key.group) is not None
            ]
            if found and (count := self._prefixes.reach(request, 0, found)):
                counts[peer] = count
        return counts
