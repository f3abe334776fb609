# SPDX-License-Identifier: Apache-2.0
"""A simulated store below the tiers of a replayed cache. Its blocks have keys but no content."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvcache.allocator import KVCacheManager, Request
from kvcache.events import CacheEvent
from kvcache.sources.store.announcements import removed_event, stored_event
from kvcache.sources.store.prefixes import StoredPrefixes
from kvcache.sources.store.values import BlockKey
from kvcache.sources.store.writes import WaitingBlocks

_NO_LIMIT = 2**62


class StoredBlock(NamedTuple):
    """When a block is complete, in a timed replay, and the store that put it."""

    ready_ms: float
    owner: SimulatedStore


class Outage(NamedTuple):
    """A time in which a store cannot be reached. With `loses_content`, it is empty afterwards."""

    begin_ms: float
    end_ms: float
    loses_content: bool


StoreContents = OrderedDict[BlockKey, StoredBlock]  # least recently used first


class ExternalTokens(Protocol):
    """A source of tokens after the hit in a replayed cache.

    `is_optional` is whether a request is computed if its tokens from the source do not fit. `link` is the
    name of the link over which the tokens of the last match are loaded.
    """

    is_optional: bool
    link: str

    def match(self, request: Request, now_ms: float = 0.0) -> int:
        """Return the number of tokens after the hit that can be loaded at a time."""

    def load(self, request: Request, num_hit: int, num_tokens: int) -> None:
        """Record that the `num_tokens` tokens before token `num_hit` are loaded."""

    def save(self) -> None:
        """Take the blocks that were cached in the last step."""

    def complete(self, ready_ms: float) -> None:
        """Set the time at which the blocks taken since the last call are complete."""

    def drain_events(self) -> list[CacheEvent]:
        """Return the events of the manager and of the source since the last call."""


class SimulatedStore:
    """A store of at most `num_blocks` blocks over all groups, with LRU eviction.

    Like a `StoreTier`, the store is queried for the tokens after the hit in the other tiers, and is
    filled with the blocks that the manager writes to its host tier. Without a host tier, it is
    filled with blocks as they become full on the device. Calls take effect immediately. Raises
    ValueError for groups that a store does not support.

    Stores with the same `contents` are one store that several managers share. A manager finds the
    blocks of the others once they are complete (`complete`).
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
        self._now_ms = 0.0  # of the last query
        self.outages: Sequence[Outage] = ()  # only in timed replays

    def hit_tokens(self, request: Request) -> int:
        """Return how many of the request's tokens are cached in the other tiers."""
        return self._prefixes.hit_tokens(request)

    def match(self, request: Request, now_ms: float = 0.0) -> int:
        """Return the number of tokens after the hit that are in the store at a time."""
        self._now_ms = now_ms
        if self._is_out(now_ms):
            return 0
        first = self._prefixes.hit_tokens(request)
        lost_ms = max(
            (
                each.begin_ms
                for each in self.outages
                if each.loses_content and each.begin_ms <= now_ms
            ),
            default=-1.0,
        )
        found = [
            key
            for key in self._prefixes.candidates(request, first)
            if (block := self._blocks.get(key))
            and (block.owner is self or block.ready_ms <= now_ms)
            and block.ready_ms > lost_ms
        ]
        return self._prefixes.reach(request, first, found) - first if found else 0

    def load(self, request: Request, num_hit: int, num_tokens: int) -> None:
        """Record a use of the blocks that hold the `num_tokens` tokens before token `num_hit`."""
        for block in self._prefixes.needed(request, num_hit - num_tokens, num_hit):
            self._blocks.move_to_end(block.key)
            self.num_loaded += 1

    def save(self) -> None:
        """Store the blocks that were cached in the last step."""
        events = self._manager.cache.drain_events()
        self._waiting.observe(events)
        changes = []
        taken = self._waiting.take(self._manager, len(self._waiting))
        for key, _, _ in () if self._is_out(self._now_ms) else taken:
            if key not in self._blocks:
                self.num_stored += 1
                changes.append(stored_event(self._manager, key))
                self._blocks[key] = StoredBlock(math.inf, self)
            self._incomplete.append(key)
            self._blocks.move_to_end(key)
            while len(self._blocks) > self.num_blocks:
                changes.append(removed_event(self._blocks.popitem(last=False)[0]))
                self.num_evicted += 1
        if self._announces:
            self._events += [*events, *changes]

    def complete(self, ready_ms: float) -> None:
        """Set the time at which the blocks that were put since the last call are complete.

        Blocks that are complete during an outage are not stored.
        """
        is_out = self._is_out(ready_ms)
        for key in self._incomplete:
            block = self._blocks.get(key)
            if block is None or ready_ms >= block.ready_ms:
                continue
            if not is_out:
                self._blocks[key] = StoredBlock(ready_ms, self)
            elif block.ready_ms == math.inf:
                del self._blocks[key]
        self._incomplete.clear()

    def forget_incomplete(self, now_ms: float) -> None:
        """Remove the blocks that this manager has put, but that are not complete at a time."""
        for key, block in [*self._blocks.items()]:
            if block.owner is self and block.ready_ms > now_ms:
                del self._blocks[key]

    def drain_events(self) -> list[CacheEvent]:
        """Return the events of the manager and of the store since the last call."""
        self.save()
        events, self._events = self._events, []
        return events

    def _is_out(self, ms: float) -> bool:
        return any(each.begin_ms <= ms < each.end_ms for each in self.outages)
