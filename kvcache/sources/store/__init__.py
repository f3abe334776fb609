# SPDX-License-Identifier: Apache-2.0
"""A third cache tier, which keeps blocks in an external store: either a distributed store or a
local disk.

Names are imported on first use. `StoreTier` requires torch. `MooncakeStore` and `DiskStore` need
the packages that their extras install.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {
    "BlockStore": "kvcache.sources.store.base",
    "Circuit": "kvcache.sources.circuit",
    "DiskStore": "kvcache.sources.store.disk",
    "MooncakeStore": "kvcache.sources.store.mooncake",
    "StoreError": "kvcache.sources.store.base",
    "Share": "kvcache.sources.store.identity",
    "StoreRank": "kvcache.sources.store.rank",
    "StoreRankLink": "kvcache.sources.store.orders",
    "StoreStats": "kvcache.sources.store.stats",
    "StoreTier": "kvcache.sources.store.tier",
    "StoredPrefixes": "kvcache.sources.store.prefixes",
    "cache_identity": "kvcache.sources.store.identity",
    "fingerprint": "kvcache.sources.store.identity",
    "open_store": "kvcache.sources.store.registry",
    "register_store": "kvcache.sources.store.registry",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME)
