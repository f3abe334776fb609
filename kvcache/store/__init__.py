"""A third tier: blocks in an existing store outside of the engine, distributed or on a disk.

Names are imported when first used; `StoreTier` needs torch, `MooncakeStore` and `DiskStore` need the
packages of their extras.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {
    "BlockStore": "kvcache.store.base",
    "Circuit": "kvcache.store.circuit",
    "DiskStore": "kvcache.store.disk",
    "MooncakeStore": "kvcache.store.mooncake",
    "Received": "kvcache.store.tier",
    "StoreError": "kvcache.store.base",
    "StoreStats": "kvcache.store.stats",
    "StoreTier": "kvcache.store.tier",
    "StoredPrefixes": "kvcache.store.prefixes",
    "fingerprint": "kvcache.store.identity",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME)
