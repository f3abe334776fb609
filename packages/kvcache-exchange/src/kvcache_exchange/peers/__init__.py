# SPDX-License-Identifier: Apache-2.0
"""An index of the prefixes that other engines have cached, and a source that loads these prefixes.

Names are imported on first use. Requires the packages on which `kvcache_exchange.router_events` depends.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {
    "EventIndex": "kvcache_exchange.peers.index",
    "PeerSource": "kvcache_exchange.peers.source",
    "PeerStats": "kvcache_exchange.peers.source",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME)
