# SPDX-License-Identifier: Apache-2.0
"""The control plane, which allocates the blocks of each request. It does not need torch."""

from typing import TYPE_CHECKING, NoReturn

from kvcache.allocator.admit import Admit, External
from kvcache.allocator.hashing import DEFAULT_SEED, hash_blocks
from kvcache.allocator.manager import KVCacheManager, check_invariants
from kvcache.allocator.misses import MISS_REASONS, MissReport
from kvcache.allocator.options import CacheArguments, CacheOptions, PolicyArguments
from kvcache.allocator.prefix_cache import (
    BlockHashes,
    CachedPrefix,
    CachedTokens,
    FoundBlocks,
    PrefixCache,
)
from kvcache.allocator.request import Request, RequestState
from kvcache.allocator.stats import PrefixCacheStats
from kvcache.lazy import fail_name
from kvcache.native.load import core

if TYPE_CHECKING:
    from kvcache._core import BlockPool, eviction_names, host_eviction_names
else:
    BlockPool = core.BlockPool
    eviction_names = core.eviction_names
    host_eviction_names = core.host_eviction_names

    def __getattr__(name: str) -> NoReturn:
        fail_name(__name__, name)


__all__ = [
    "DEFAULT_SEED",
    "MISS_REASONS",
    "Admit",
    "BlockHashes",
    "BlockPool",
    "CacheArguments",
    "CacheOptions",
    "CachedPrefix",
    "CachedTokens",
    "External",
    "FoundBlocks",
    "KVCacheManager",
    "MissReport",
    "PolicyArguments",
    "PrefixCache",
    "PrefixCacheStats",
    "Request",
    "RequestState",
    "check_invariants",
    "eviction_names",
    "hash_blocks",
    "host_eviction_names",
]
