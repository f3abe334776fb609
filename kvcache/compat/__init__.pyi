# SPDX-License-Identifier: Apache-2.0
"""Public names, which `__init__.py` imports on first use."""

from kvcache.compat import ascend_block_table as ascend_block_table
from kvcache.compat import block_space_manager as block_space_manager
from kvcache.compat import kv_cache_manager as kv_cache_manager
from kvcache.compat import kv_transfer as kv_transfer
from kvcache.compat import vllm_block_table as vllm_block_table
from kvcache.compat.block_space_manager import AllocStatus as AllocStatus
from kvcache.compat.block_space_manager import BlockSpaceManager as BlockSpaceManager
from kvcache.compat.block_space_manager import (
    SelfAttnBlockSpaceManager as SelfAttnBlockSpaceManager,
)
from kvcache.compat.block_space_manager import SequenceGroupLike as SequenceGroupLike
from kvcache.compat.block_space_manager import SequenceLike as SequenceLike
from kvcache.compat.kv_cache_manager import KVCacheBlock as KVCacheBlock
from kvcache.compat.kv_cache_manager import KVCacheManager as KVCacheManager
from kvcache.compat.kv_transfer import KVCacheEvents as KVCacheEvents
from kvcache.compat.kv_transfer import KVConnectorOutput as KVConnectorOutput
from kvcache.compat.kv_transfer import KVOutputAggregator as KVOutputAggregator
from kvcache.compat.kv_transfer import KVTopology as KVTopology
from kvcache.compat.kv_transfer import RemoteEngine as RemoteEngine
from kvcache.compat.kv_transfer import TpKVTopology as TpKVTopology
from kvcache.compat.kv_transfer import copy_kv_blocks as copy_kv_blocks
from kvcache.compat.kv_transfer import (
    get_kv_connector_cache_layout as get_kv_connector_cache_layout,
)
from kvcache.compat.kv_transfer import (
    kv_postprocess_blksize_and_layout_on_receive as kv_postprocess_blksize_and_layout_on_receive,
)
from kvcache.compat.kv_transfer import (
    kv_postprocess_blksize_on_receive as kv_postprocess_blksize_on_receive,
)
from kvcache.compat.kv_transfer import (
    kv_postprocess_layout_on_receive as kv_postprocess_layout_on_receive,
)
from kvcache.compat.kv_transfer import yield_req_data as yield_req_data
