"""Prefill in one engine, decode in another: offers, leases, loads and what becomes of those that fail.

Names are imported when first used: ranks need torch.
"""

from __future__ import annotations

import importlib

_HOME = {
    "CacheRank": "kvcache.disaggregation.cache_rank",
    "Connector": "kvcache.disaggregation.connector",
    "ConnectorOptions": "kvcache.disaggregation.options",
    "GroupLayout": "kvcache.disaggregation.layout",
    "Loaded": "kvcache.disaggregation.connector",
    "Offer": "kvcache.disaggregation.offer",
    "layouts_of_plan": "kvcache.disaggregation.cache_rank",
}

__all__ = [*_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'kvcache.disaggregation' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
