# SPDX-License-Identifier: Apache-2.0
"""A router's index of a replica's cached blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcache.allocator import CachedTokens
from kvcache.events import AllBlocksCleared, BlockRemoved, CacheEvent
from kvcache.specs import GroupSpec


class RouterIndex:
    """The blocks that a replica has announced in its events.

    After `clear`, the index learns only of blocks that are announced again, because they are stored
    or because requests hit them (`CacheOptions.announce_reused`).

    The index follows a single cache group: the first one with full attention, or the first one if
    no group has full attention.
    """

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        kinds = [spec.kind for spec in groups]
        self._group = kinds.index("full_attention") if "full_attention" in kinds else 0
        self._block_size = groups[self._group].block_size
        self._hashes: dict[str, set[bytes]] = {"gpu": set(), "cpu": set()}

    def clear(self) -> None:
        """Forget all blocks."""
        for each in self._hashes.values():
            each.clear()

    def observe(self, events: Iterable[CacheEvent]) -> None:
        """Process the replica's events, in order."""
        for event in events:
            known = self._hashes.get(event.medium)
            if known is None:
                continue  # events of the store, which all replicas can load from
            if isinstance(event, AllBlocksCleared):
                known.clear()
            elif event.group != self._group:
                continue
            elif isinstance(event, BlockRemoved):
                known.difference_update(each.tobytes() for each in event.block_hashes)
            else:
                known.update(each.tobytes() for each in event.block_hashes)

    def cached_tokens(self, hashes: np.ndarray, hash_block_size: int) -> CachedTokens:
        """Count the tokens of a request that are known to be cached on each tier.

        Args:
            hashes: uint8[n, hash_bytes], the request's hashes.
            hash_block_size: Tokens per hash.
        """
        device, host = self._hashes["gpu"], self._hashes["cpu"]
        on_device = num_known = 0
        per_block = self._block_size // hash_block_size
        for each in hashes[per_block - 1 :: per_block]:
            key = each.tobytes()
            if key in device:
                on_device += on_device == num_known
            elif key not in host:
                break
            num_known += 1
        return CachedTokens(on_device * self._block_size, num_known * self._block_size, 0, 0)
