# SPDX-License-Identifier: Apache-2.0
"""The queue of blocks that are waiting to be put into a store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvcache.allocator import KVCacheManager
from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from kvcache_exchange.store.value_format import BlockKey


class Described(NamedTuple):
    """The cache event that describes a block, and the block's index in the event."""

    event: BlockStored
    index: int


class WaitingBlocks:
    """A bounded FIFO queue of blocks that were cached on a medium and must be put into a store.

    With `describes`, the queue also keeps the device events of the queued blocks and of all blocks
    that may be queued later.
    """

    def __init__(self, medium: str, most: int, *, describes: bool = False) -> None:
        self._medium, self._most, self._describes = medium, most, describes
        self._waiting: dict[BlockKey, None] = {}
        self._on_device: dict[BlockKey, Described] = {}
        self._described: dict[BlockKey, Described] = {}  # descriptions of the queued blocks
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def observe(self, events: Iterable[CacheEvent]) -> None:
        """Process the manager's events. Each event must be passed exactly once, in order."""
        gone: set[BlockKey] = set()  # removed last: an evicted block may be written to the host
        for event in events:
            if isinstance(event, AllBlocksCleared):
                if event.medium == self._medium:
                    self._waiting.clear()
                    self._described.clear()
                if event.medium == "gpu":
                    gone.update(self._on_device)
                continue
            keys = [BlockKey(event.group, each.tobytes()) for each in event.block_hashes]
            if isinstance(event, BlockRemoved):
                if event.medium == "gpu":
                    gone.update(keys)
                if event.medium == self._medium:
                    for key in keys:
                        self._forget(key)
                continue
            if event.medium == "gpu" and self._describes:
                self._on_device |= {key: Described(event, i) for i, key in enumerate(keys)}
                gone.difference_update(keys)
            if event.medium == self._medium:
                for key in keys:
                    self._add(key)
        for key in gone:
            self._on_device.pop(key, None)

    def take(
        self, manager: KVCacheManager, most: int
    ) -> list[tuple[BlockKey, int, Described | None]]:
        """Dequeue the oldest blocks that are still cached, and return them with their pages.

        All of the manager's plans must have been applied.
        """
        keys = list(self._waiting)[:most]
        by_group: dict[int, list[BlockKey]] = defaultdict(list)
        for key in keys:
            by_group[key.group].append(key)
        pages: dict[BlockKey, int] = {}
        for group, of_group in by_group.items():
            hashes = np.frombuffer(b"".join(key.block_hash for key in of_group), np.uint8)
            found = manager.cache.find(hashes.reshape(len(of_group), -1), group)
            ids = found.device if self._medium == "gpu" else found.host
            pages |= dict(zip(of_group, ids.tolist()))
        taken = [(key, pages[key], self._described.get(key)) for key in keys if pages[key] > 0]
        self.num_dropped += len(keys) - len(taken)
        for key in keys:
            self._forget(key)
        return taken

    def _add(self, key: BlockKey) -> None:
        self._waiting.pop(key, None)
        self._waiting[key] = None
        if key in self._on_device:
            self._described[key] = self._on_device[key]
        if len(self._waiting) > self._most:
            self._forget(next(iter(self._waiting)))
            self.num_dropped += 1

    def _forget(self, key: BlockKey) -> None:
        self._waiting.pop(key, None)
        self._described.pop(key, None)
