# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill: offers, leases, loads, and recovery from failed loads.

Names are imported on first use. Only the ranks need torch; the connector does not.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {
    "CacheRank": "kvcache_exchange.disaggregation.cache_rank",
    "Connector": "kvcache_exchange.disaggregation.connector",
    "ConnectorOptions": "kvcache_exchange.disaggregation.options",
    "GroupLayout": "kvcache_exchange.disaggregation.layout",
    "Offer": "kvcache_exchange.disaggregation.offer",
    "PrefillStats": "kvcache_exchange.disaggregation.prefill",
    "RemotePrefill": "kvcache_exchange.disaggregation.prefill",
    "layouts_of_plan": "kvcache_exchange.disaggregation.cache_rank",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME)
