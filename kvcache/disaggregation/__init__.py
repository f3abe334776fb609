"""Prefill in one engine, decode in another: offers, leases, loads and what becomes of those that fail.

Names are imported when first used: ranks need torch.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _HOME)
