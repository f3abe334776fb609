# SPDX-License-Identifier: Apache-2.0
"""Prefixes that other engines have cached: an index of their events, and a source that loads from them.

Names are imported on first use. Requires the packages of `kvcache.router_events`.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {
    "EventIndex": "kvcache.sources.peers.index",
    "PeerSource": "kvcache.sources.peers.source",
    "PeerStats": "kvcache.sources.peers.source",
    "PrefixIndex": "kvcache.sources.peers.index",
    "RadixTreeIndex": "kvcache.sources.peers.index",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME)
