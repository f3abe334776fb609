# SPDX-License-Identifier: Apache-2.0
"""Public names, which `__init__.py` imports on first use."""

from kvcache_exchange.circuit import Circuit as Circuit
from kvcache_exchange.store.base import BlockStore as BlockStore
from kvcache_exchange.store.base import StoreError as StoreError
from kvcache_exchange.store.disk import DiskStore as DiskStore
from kvcache_exchange.store.identity import Share as Share
from kvcache_exchange.store.identity import cache_identity as cache_identity
from kvcache_exchange.store.identity import fingerprint as fingerprint
from kvcache_exchange.store.mooncake import MooncakeStore as MooncakeStore
from kvcache_exchange.store.orders import StoreRankLink as StoreRankLink
from kvcache_exchange.store.prefixes import StoredPrefixes as StoredPrefixes
from kvcache_exchange.store.rank import StoreRank as StoreRank
from kvcache_exchange.store.registry import open_store as open_store
from kvcache_exchange.store.registry import register_store as register_store
from kvcache_exchange.store.stats import StoreStats as StoreStats
from kvcache_exchange.store.tier import StoreTier as StoreTier
