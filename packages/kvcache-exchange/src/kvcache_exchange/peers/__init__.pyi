# SPDX-License-Identifier: Apache-2.0
"""Public names, which `__init__.py` imports on first use."""

from kvcache_exchange.peers.index import EventIndex as EventIndex
from kvcache_exchange.peers.source import PeerSource as PeerSource
from kvcache_exchange.peers.source import PeerStats as PeerStats
