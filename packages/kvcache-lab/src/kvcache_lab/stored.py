# SPDX-License-Identifier: Apache-2.0
"""A simulated store below the tiers of a replayed cache. Its blocks have keys but no content."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple, Protocol

from kvcache.allocator import KVCacheManager, Request
from kvcache.events import CacheEvent
from kvcache_exchange.store.prefixes import StoredPrefixes
from kvcache_exchange.store.value_format import BlockKey
from kvcache_exchange.store.writes import WaitingBlocks

_NO_LIMIT = 2**62


class StoredBlock(NamedTuple):
    """The time at which a block is complete in a timed replay, and the `SimulatedStore` that put
    the block.
    """

    ready_ms: float
    owner: SimulatedStore


StoreContents = OrderedDict[BlockKey, StoredBlock]  # least recently used first


class ExternalTokens(Protocol):
    """A source from which a replayed cache loads the tokens after a prefix hit.

    If `is_optional` is true, a request whose tokens from the source do not fit is computed without
    them. `link` is the name of the link over which the tokens of the last match are loaded.
    """

    is_optional: bool
    link: str

    def match(self, request: Request, now_ms: float = 0.0) -> int:
        """Return the number of tokens after the hit that can be loaded at `now_ms`."""

    def load(self, request: Request, num_hit: int, num_tokens: int) -> None:
        """Record that tokens [num_hit - num_tokens, num_hit) are loaded."""

    def save(self) -> None:
        """Collect the blocks that were cached in the last step."""

    def complete(self, ready_ms: float) -> None:
        """Set the completion time of the blocks collected since the last call."""

    def drain_events(self) -> list[CacheEvent]:
        """Return the events of the manager since the last call."""


class SimulatedStore:
    """A store of at most `num_blocks` blocks over all groups, with LRU eviction.

    As with a `StoreTier`, the store is queried for the tokens after the hit in the other tiers, and
    the blocks that the manager writes to its host tier are stored. Without a host tier, blocks are
    stored as they become full on the device. Calls take effect immediately. Raises ValueError for
    groups that a store does not support.

    Instances with the same `contents` represent one store that several managers share. A manager
    finds the blocks of other managers once these blocks are complete (`complete`).
    """

    is_optional = True
    link = "store"

    def __init__(
        self,
        manager: KVCacheManager,
        num_blocks: int,
        *,
        announce: bool,
        contents: StoreContents | None = None,
    ) -> None:
        self._manager, self._announces = manager, announce
        self._prefixes = StoredPrefixes(manager)
        medium = "gpu" if manager.host_pool is None else "cpu"
        self._waiting = WaitingBlocks(medium, _NO_LIMIT)
        self._blocks: StoreContents = OrderedDict() if contents is None else contents
        self.num_blocks = num_blocks
        self.num_stored = self.num_loaded = self.num_evicted = 0
        self._events: list[CacheEvent] = []
        self._incomplete: list[BlockKey] = []

    def match(self, request: Request, now_ms: float = 0.0) -> int:
        """Return the number of tokens after the hit that the store contains at `now_ms`."""
        first = self._prefixes.hit_tokens(request)
        found = [
            key
            for key in self._prefixes.candidates(request, first)
            if (block := self._blocks.get(key))
            and (block.owner is self or block.ready_ms <= now_ms)
        ]
        return self._prefixes.reach(request, first, found) - first if found else 0

    def load(self, request: Request, num_hit: int, num_tokens: int) -> None:
        """Record a use of the blocks that hold tokens [num_hit - num_tokens, num_hit)."""
        for block in self._prefixes.needed(request, num_hit - num_tokens, num_hit):
            self._blocks.move_to_end(block.key)
            self.num_loaded += 1

    def save(self) -> None:
        """Store the blocks that were cached in the last step."""
        events = self._manager.cache.drain_events()
        self._waiting.observe(events)
        for key, _, _ in self._waiting.take(self._manager, len(self._waiting)):
            if key not in self._blocks:
                self.num_stored += 1
                self._blocks[key] = StoredBlock(math.inf, self)
            self._incomplete.append(key)
            self._blocks.move_to_end(key)
            while len(self._blocks) > self.num_blocks:
                self._blocks.popitem(last=False)
                self.num_evicted += 1
        if self._announces:
            self._events += events

    def complete(self, ready_ms: float) -> None:
        """Set the completion time of the blocks that were put since the last call."""
        for key in self._incomplete:
            block = self._blocks.get(key)
            if block is not None and ready_ms < block.ready_ms:
                self._blocks[key] = StoredBlock(ready_ms, self)
        self._incomplete.clear()

    def drain_events(self) -> list[CacheEvent]:
        """Return the events of the manager since the last call."""
        self.save()
        events, self._events = self._events, []
        return events
