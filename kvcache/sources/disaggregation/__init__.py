# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill: offers, leases, loads, and recovery from failed loads.

Names are imported on first use. Only the ranks need torch; the connector does not.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {
    "CacheRank": "kvcache.sources.disaggregation.cache_rank",
    "Connector": "kvcache.sources.disaggregation.connector",
    "ConnectorOptions": "kvcache.sources.disaggregation.options",
    "GroupLayout": "kvcache.sources.disaggregation.layout",
    "Offer": "kvcache.sources.disaggregation.offer",
    "PrefillStats": "kvcache.sources.disaggregation.prefill",
    "RemotePrefill": "kvcache.sources.disaggregation.prefill",
    "layouts_of_plan": "kvcache.sources.disaggregation.cache_rank",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME)
