# SPDX-License-Identifier: Apache-2.0
"""Creates cache events that describe a store's content, for consumers of cache events."""

from __future__ import annotations

import numpy as np

from kvcache.allocator import KVCacheManager
from kvcache.events import BlockRemoved, BlockStored
from kvcache.step import NO_IDS
from kvcache_exchange.store.value_format import BlockKey
from kvcache_exchange.store.writes import Described

MEDIUM = "storage"


def stored_event(
    manager: KVCacheManager, key: BlockKey, described: Described | None = None
) -> BlockStored:
    """Return the event for a stored block.

    The event includes a parent and tokens only if the device's event is given.
    """
    spec, size = manager.groups[key.group], manager.block_sizes[key.group]
    of_group = {
        "block_size": size,
        "group": key.group,
        "medium": MEDIUM,
        "hash_algorithm": manager.cache.hash_algorithm,
        "hash_block_size": manager.cache.hash_block_size,
        "group_kind": spec.kind,
        "window": spec.options.get("window"),
    }
    if described is None:
        return BlockStored(_hashes(key), None, NO_IDS, **of_group)
    event, i = described
    parent = event.parent_hash if i == 0 else event.block_hashes[i - 1].tobytes()
    extra_keys = event.extra_keys
    if extra_keys is not None:
        per_block = size // event.hash_block_size
        extra_keys = extra_keys[i * per_block : (i + 1) * per_block]
    return BlockStored(
        _hashes(key),
        parent,
        event.token_ids[i * size : (i + 1) * size],
        lora=event.lora,
        session=event.session,
        extra_keys=extra_keys,
        root_hash=event.root_hash,
        **of_group,
    )


def removed_event(key: BlockKey) -> BlockRemoved:
    """Return the event for a block that was removed from the store."""
    return BlockRemoved(_hashes(key), key.group, MEDIUM)


def _hashes(key: BlockKey) -> np.ndarray:
    return np.frombuffer(key.block_hash, np.uint8).reshape(1, -1)
