# SPDX-License-Identifier: Apache-2.0
"""Public names, for type checkers. `__init__.py` imports each name on first use."""

from kvcache.sources.peers.index import EventIndex as EventIndex
from kvcache.sources.peers.index import PrefixIndex as PrefixIndex
from kvcache.sources.peers.index import RadixTreeIndex as RadixTreeIndex
from kvcache.sources.peers.source import PeerSource as PeerSource
from kvcache.sources.peers.source import PeerStats as PeerStats
