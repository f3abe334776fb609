# SPDX-License-Identifier: Apache-2.0
"""vLLM's manager of sequence groups (`vllm/core/block_manager.py` up to version 0.10), over
`kvcache.KVCacheManager`.

A caller replaces `from vllm.core.block_manager import` by
`from kvcache.compat.block_space_manager import`. Sequences and groups are any objects with the attributes
of `SequenceLike` and `SequenceGroupLike`.

| there | here |
|---|---|
| `SelfAttnBlockSpaceManager(block_size, num_gpu_blocks, num_cpu_blocks, watermark, sliding_window, enable_caching)` | the same, also as `BlockSpaceManager`; both numbers of blocks include the null block, so add one to each |
| `block_allocator`, with which host blocks extend the cache | not an argument: `num_host_blocks` of `kvcache.KVCacheManager` is such a tier |
| `can_allocate`, `allocate`, `can_append_slots`, `append_slots`, `can_swap_out`, `swap_out`, `can_swap_in`, `swap_in`, `get_block_table`, `get_cross_block_table`, `free`, `free_cross` | the same |
| `fork` of an unknown parent has no effect | `ValueError` |
| the engine may choose the order of swaps and copies | the pairs must be processed in the order of the calls |
| blocks become hits when they are full | when `mark_blocks_as_computed(seq_group, token_chunk_size)` says that they were computed |
| `get_common_computed_block_ids` of decoding sequences includes the blocks that they have computed | only the blocks that were hits at the allocation |
| `access_all_blocks_in_seq`, `get_num_cached_tokens`, `remove_seq_from_computed_blocks_tracker`, `get_prefix_cache_hit_rate`, `reset_prefix_cache`, `get_num_free_gpu_blocks`, `get_num_free_cpu_blocks` | the same |

>>> manager = SelfAttnBlockSpaceManager(16, num_gpu_blocks=9, num_cpu_blocks=9)
>>> manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()
(8, 8)
"""  # noqa: E501

from kvcache.compat.block_space_manager.manager import BlockSpaceManager
from kvcache.compat.block_space_manager.protocol import AllocStatus, SequenceGroupLike, SequenceLike

SelfAttnBlockSpaceManager = BlockSpaceManager

__all__ = [
    "AllocStatus",
    "BlockSpaceManager",
    "SelfAttnBlockSpaceManager",
    "SequenceGroupLike",
    "SequenceLike",
]
