"""Public names, for type checkers; `__init__.py` imports each when it is first used."""

from kvcache.store.base import BlockStore as BlockStore
from kvcache.store.base import StoreError as StoreError
from kvcache.store.circuit import Circuit as Circuit
from kvcache.store.disk import DiskStore as DiskStore
from kvcache.store.identity import fingerprint as fingerprint
from kvcache.store.mooncake import MooncakeStore as MooncakeStore
from kvcache.store.prefixes import StoredPrefixes as StoredPrefixes
from kvcache.store.stats import StoreStats as StoreStats
from kvcache.store.tier import Received as Received
from kvcache.store.tier import StoreTier as StoreTier
