# SPDX-License-Identifier: Apache-2.0
"""Public names for type checkers. `__init__.py` imports each name on first use."""

from kvcache.compat import ascend_block_table as ascend_block_table
from kvcache.compat import block_space_manager as block_space_manager
from kvcache.compat import kv_cache_manager as kv_cache_manager
from kvcache.compat import kv_transfer as kv_transfer
from kvcache.compat import vllm_block_table as vllm_block_table
from kvcache.compat.block_space_manager import (
    AllocStatus as AllocStatus,
    BlockSpaceManager as BlockSpaceManager,
    SelfAttnBlockSpaceManager as SelfAttnBlockSpaceManager,
    SequenceGroupLike as SequenceGroupLike,
    SequenceLike as SequenceLike,
)
from kvcache.compat.kv_cache_manager import (
    KVCacheBlock as KVCacheBlock,
    KVCacheManager as KVCacheManager,
)
from kvcache.compat.kv_transfer import (
    KVCacheEvents as KVCacheEvents,
    KVConnectorOutput as KVConnectorOutput,
    KVOutputAggregator as KVOutputAggregator,
    KVTopology as KVTopology,
    RemoteEngine as RemoteEngine,
    TpKVTopology as TpKVTopology,
    copy_kv_blocks as copy_kv_blocks,
    get_kv_connector_cache_layout as get_kv_connector_cache_layout,
    kv_postprocess_blksize_and_layout_on_receive as kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive as kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive as kv_postprocess_layout_on_receive,
    yield_req_data as yield_req_data,
)
