"""A store under the tiers of a replayed cache, by count: its blocks have keys and no content."""

from __future__ import annotations

from collections import OrderedDict

from kvcache.allocator import KVCacheManager, Request
from kvcache.events import CacheEvent
from kvcache.store.announcements import removed_event, stored_event
from kvcache.store.prefixes import StoredPrefixes
from kvcache.store.values import BlockKey
from kvcache.store.writes import WaitingBlocks

_NO_LIMIT = 2**62


class SimulatedStore:
    """At most `num_blocks` blocks, over all groups; the least recently used goes first.

    It is asked and filled as by a `StoreTier`: for the tokens behind the hit, and with what the manager
    writes to its host tier, or, without one, with what fills on the device. All of it happens at once.
    ValueError for groups that a store cannot fill.
    """

    def __init__(self, manager: KVCacheManager, num_blocks: int, *, announce: bool) -> None:
        self._manager, self._announces = manager, announce
        self._prefixes = StoredPrefixes(manager)
        medium = "gpu" if manager.host_pool is None else "cpu"
        self._waiting = WaitingBlocks(medium, _NO_LIMIT)
        self._blocks: OrderedDict[BlockKey, None] = OrderedDict()
        self.num_blocks = num_blocks
        self.num_stored = self.num_loaded = self.num_evicted = 0
        self._events: list[CacheEvent] = []

    def match(self, request: Request) -> int:
        """Tokens behind the hit that it has."""
        first = self._prefixes.hit_tokens(request)
        found = [key for key in self._prefixes.candidates(request, first) if key in self._blocks]
        return self._prefixes.reach(request, first, found) - first if found else 0

    def load(self, request: Request, num_hit: int, num_tokens: int) -> None:
        """These blocks are used: `num_tokens` tokens that end at token `num_hit`."""
        for block in self._prefixes.needed(request, num_hit - num_tokens, num_hit):
            self._blocks.move_to_end(block.key)
            self.num_loaded += 1

    def save(self) -> None:
        """Takes what the last step has cached."""
        events = self._manager.drain_events()
        self._waiting.observe(events)
        changes = []
        for key, _, _ in self._waiting.take(self._manager, len(self._waiting)):
            if key not in self._blocks:
                self.num_stored += 1
                changes.append(stored_event(self._manager, key))
            self._blocks[key] = None
            self._blocks.move_to_end(key)
            while len(self._blocks) > self.num_blocks:
                changes.append(removed_event(self._blocks.popitem(last=False)[0]))
                self.num_evicted += 1
        if self._announces:
            self._events += [*events, *changes]

    def drain_events(self) -> list[CacheEvent]:
        """The manager's events since the last call, and its own."""
        self.save()
        events, self._events = self._events, []
        return events
