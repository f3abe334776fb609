"""Public names, for type checkers; `__init__.py` imports each when it is first used."""

from kvcache import (
    allocator as allocator,
)
from kvcache import (
    disaggregation as disaggregation,
)
from kvcache import (
    events as events,
)
from kvcache import (
    layouts as layouts,
)
from kvcache import (
    ops as ops,
)
from kvcache import (
    replay as replay,
)
from kvcache import (
    step as step,
)
from kvcache import (
    transfer as transfer,
)
from kvcache import (
    worker as worker,
)
from kvcache.allocator import (
    AllocStatus as AllocStatus,
)
from kvcache.allocator import (
    BlockHashes as BlockHashes,
)
from kvcache.allocator import (
    BlockPool as BlockPool,
)
from kvcache.allocator import (
    BlockSpaceManager as BlockSpaceManager,
)
from kvcache.allocator import (
    CachedTokens as CachedTokens,
)
from kvcache.allocator import (
    CacheOptions as CacheOptions,
)
from kvcache.allocator import (
    FoundBlocks as FoundBlocks,
)
from kvcache.allocator import (
    KVCacheManager as KVCacheManager,
)
from kvcache.allocator import (
    LearnedReuse as LearnedReuse,
)
from kvcache.allocator import (
    PrefixCacheStats as PrefixCacheStats,
)
from kvcache.allocator import (
    Request as Request,
)
from kvcache.allocator import (
    eviction_names as eviction_names,
)
from kvcache.allocator import (
    hash_blocks as hash_blocks,
)
from kvcache.allocator import (
    host_eviction_names as host_eviction_names,
)
from kvcache.assembly import KVCache as KVCache
from kvcache.assembly import build as build
from kvcache.memory_plan import CachePlan as CachePlan
from kvcache.memory_plan import plan_cache as plan_cache
from kvcache.specs import (
    ContextParallel as ContextParallel,
)
from kvcache.specs import (
    GroupSpec as GroupSpec,
)
from kvcache.specs import (
    LayerSpec as LayerSpec,
)
from kvcache.step import Status as Status
from kvcache.step import StepPlan as StepPlan
from kvcache.step import StepReport as StepReport
from kvcache.worker import (
    AttentionMetadata as AttentionMetadata,
)
from kvcache.worker import (
    AttentionMetadataBuilder as AttentionMetadataBuilder,
)
from kvcache.worker import (
    BlockTable as BlockTable,
)
from kvcache.worker import (
    KVStorage as KVStorage,
)
from kvcache.worker import (
    MultiGroupBlockTable as MultiGroupBlockTable,
)
from kvcache.worker import (
    Pages as Pages,
)
from kvcache.worker import (
    SwapEngine as SwapEngine,
)
from kvcache.worker import (
    Worker as Worker,
)

__version__: str
