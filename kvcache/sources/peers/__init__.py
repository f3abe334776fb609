# SPDX-License-Identifier: Apache-2.0
"""An index of the prefixes that other engines have cached, and a source that loads these prefixes.

Names are imported on first use. Requires the packages on which `kvcache.router_events` depends.
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
