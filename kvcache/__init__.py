# SPDX-License-Identifier: Apache-2.0
"""kvcache: the KV-cache layer of an LLM inference engine as a library.

Public names are imported on first use. The control plane (`BlockPool`, `KVCacheManager`, `Request`,
`hash_blocks`, `StepPlan`) does not need torch. The data plane (`BlockTables`, `KVStorage`, `Worker`,
`ops`), and `build`, which creates both planes, import torch.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

__version__ = "0.1.0"

_HOME = {
    "BlockPool": "kvcache.allocator",
    "Admit": "kvcache.allocator",
    "CacheOptions": "kvcache.allocator",
    "BlockHashes": "kvcache.allocator",
    "CachedTokens": "kvcache.allocator",
    "External": "kvcache.allocator",
    "FoundBlocks": "kvcache.allocator",
    "KVCacheManager": "kvcache.allocator",
    "PrefixCacheStats": "kvcache.allocator",
    "Request": "kvcache.allocator",
    "RequestState": "kvcache.allocator",
    "eviction_names": "kvcache.allocator",
    "hash_blocks": "kvcache.allocator",
    "host_eviction_names": "kvcache.allocator",
    "KVCache": "kvcache.assembly",
    "build": "kvcache.assembly",
    "CachePlan": "kvcache.memory_plan",
    "ContextParallel": "kvcache.specs",
    "GroupSpec": "kvcache.specs",
    "LayerSpec": "kvcache.specs",
    "plan_cache": "kvcache.memory_plan",
    "Status": "kvcache.step",
    "StepPlan": "kvcache.step",
    "StepReport": "kvcache.step",
    "AttentionMetadata": "kvcache.worker",
    "AttentionMetadataBuilder": "kvcache.worker",
    "GroupTable": "kvcache.worker",
    "BlockTables": "kvcache.worker",
    "KVStorage": "kvcache.worker",
    "Pages": "kvcache.worker",
    "SwapEngine": "kvcache.worker",
    "TableShape": "kvcache.worker",
    "Worker": "kvcache.worker",
}
_MODULES = ("ops", "worker", "transfer", "sources", "allocator", "layouts", "step", "events")

__all__ = [*_HOME, *_MODULES]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME, _MODULES)
