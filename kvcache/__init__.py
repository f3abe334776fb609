"""kvcache: the KV-cache layer of an LLM inference engine as a library.

Public names are imported when first used: the control plane (`BlockPool`, `BlockSpaceManager`,
`KVCacheManager`, `Request`, `hash_blocks`, `StepPlan`) works where torch is not installed; the data plane
(`BlockTable`, `KVStorage`, `Worker`, `ops`) imports it, and so does `build`, which makes both.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

__version__ = "0.1.0"

_HOME = {
    "AllocStatus": "kvcache.allocator",
    "BlockPool": "kvcache.allocator",
    "BlockSpaceManager": "kvcache.allocator",
    "CacheOptions": "kvcache.allocator",
    "BlockHashes": "kvcache.allocator",
    "CachedTokens": "kvcache.allocator",
    "FoundBlocks": "kvcache.allocator",
    "KVCacheManager": "kvcache.allocator",
    "LearnedReuse": "kvcache.allocator",
    "PrefixCacheStats": "kvcache.allocator",
    "Request": "kvcache.allocator",
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
    "BlockTable": "kvcache.worker",
    "KVStorage": "kvcache.worker",
    "MultiGroupBlockTable": "kvcache.worker",
    "Pages": "kvcache.worker",
    "SwapEngine": "kvcache.worker",
    "Worker": "kvcache.worker",
}
_MODULES = (
    *("ops", "worker", "transfer", "disaggregation", "allocator", "replay", "layouts", "step"),
    "events",
)

__all__ = [*_HOME, *_MODULES]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME, _MODULES)
