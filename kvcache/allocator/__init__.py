"""The control plane, which decides the blocks of each request. Works without torch."""

from kvcache.allocator.hashing import DEFAULT_SEED, hash_blocks
from kvcache.allocator.learned import LearnedReuse
from kvcache.allocator.manager import BlockHashes, CachedTokens, FoundBlocks, KVCacheManager
from kvcache.allocator.options import CacheArguments, CacheOptions, PolicyArguments
from kvcache.allocator.request import Request
from kvcache.allocator.sequences.block_space_manager import BlockSpaceManager
from kvcache.allocator.sequences.demand import AllocStatus
from kvcache.allocator.stats import PrefixCacheStats
from kvcache.native.load import core

BlockPool = core.BlockPool
eviction_names = core.eviction_names
host_eviction_names = core.host_eviction_names

__all__ = [
    "DEFAULT_SEED",
    "AllocStatus",
    "BlockHashes",
    "BlockPool",
    "BlockSpaceManager",
    "CacheArguments",
    "CacheOptions",
    "CachedTokens",
    "FoundBlocks",
    "KVCacheManager",
    "LearnedReuse",
    "PolicyArguments",
    "PrefixCacheStats",
    "Request",
    "eviction_names",
    "hash_blocks",
    "host_eviction_names",
]
