# SPDX-License-Identifier: Apache-2.0
"""Public names, for type checkers. `__init__.py` imports each name on first use."""

from kvcache.sources.circuit import Circuit as Circuit
from kvcache.sources.store.base import BlockStore as BlockStore
from kvcache.sources.store.base import StoreError as StoreError
from kvcache.sources.store.disk import DiskStore as DiskStore
from kvcache.sources.store.identity import Share as Share
from kvcache.sources.store.identity import cache_identity as cache_identity
from kvcache.sources.store.identity import fingerprint as fingerprint
from kvcache.sources.store.mooncake import MooncakeStore as MooncakeStore
from kvcache.sources.store.orders import StoreRankLink as StoreRankLink
from kvcache.sources.store.prefixes import StoredPrefixes as StoredPrefixes
from kvcache.sources.store.rank import StoreRank as StoreRank
from kvcache.sources.store.registry import open_store as open_store
from kvcache.sources.store.registry import register_store as register_store
from kvcache.sources.store.stats import StoreStats as StoreStats
from kvcache.sources.store.tier import StoreTier as StoreTier
