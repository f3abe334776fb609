"""A third tier: blocks in an existing store outside of the engine, distributed or on a disk.

Names are imported when first used; `StoreTier` needs torch, `MooncakeStore` and `DiskStore` need the
packages of their extras.
"""

from __future__ import annotations

import importlib

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


def __getattr__(name: str) -> object:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'kvcache.store' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
