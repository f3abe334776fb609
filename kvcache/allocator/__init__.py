"""The control plane: which blocks. Works without torch."""

from kvcache._native import core
from kvcache.allocator.hashing import DEFAULT_SEED, hash_blocks
from kvcache.allocator.manager import CachedTokens, KVCacheManager
from kvcache.allocator.request import Request
from kvcache.allocator.sequence_demand import AllocStatus
from kvcache.allocator.sequences import BlockSpaceManager
from kvcache.allocator.stats import PrefixCacheStats

BlockPool = core.BlockPool
eviction_names = core.eviction_names

__all__ = [
    "DEFAULT_SEED",
    "AllocStatus",
    "BlockPool",
    "BlockSpaceManager",
    "CachedTokens",
    "KVCacheManager",
    "PrefixCacheStats",
    "Request",
    "eviction_names",
    "hash_blocks",
]
