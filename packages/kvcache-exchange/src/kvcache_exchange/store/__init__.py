# SPDX-License-Identifier: Apache-2.0
"""A third cache tier, which keeps blocks in an external store: either a distributed store or a
local disk.

Names are imported on first use. `StoreTier` requires torch. `MooncakeStore` and `DiskStore` need
the packages that their extras install.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {
    "BlockStore": "kvcache_exchange.store.base",
    "Circuit": "kvcache_exchange.circuit",
    "DiskStore": "kvcache_exchange.store.disk",
    "MooncakeStore": "kvcache_exchange.store.mooncake",
    "StoreError": "kvcache_exchange.store.base",
    "Share": "kvcache_exchange.store.identity",
    "StoreRank": "kvcache_exchange.store.rank",
    "StoreRankLink": "kvcache_exchange.store.orders",
    "StoreStats": "kvcache_exchange.store.stats",
    "StoreTier": "kvcache_exchange.store.tier",
    "StoredPrefixes": "kvcache_exchange.store.prefixes",
    "cache_identity": "kvcache_exchange.store.identity",
    "fingerprint": "kvcache_exchange.store.identity",
    "open_store": "kvcache_exchange.store.registry",
    "register_store": "kvcache_exchange.store.registry",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME)
