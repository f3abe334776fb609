# SPDX-License-Identifier: Apache-2.0
"""Public names for type checkers. `__init__.py` imports each name on first use."""

from kvcache.compat.aggregate import KVConnectorOutput as KVConnectorOutput
from kvcache.compat.aggregate import KVOutputAggregator as KVOutputAggregator
from kvcache.compat.block_tables import BlockTable as BlockTable
from kvcache.compat.block_tables import MultiGroupBlockTable as MultiGroupBlockTable
from kvcache.compat.cache_events import KVCacheEvents as KVCacheEvents
from kvcache.compat.kv_blocks import copy_kv_blocks as copy_kv_blocks
from kvcache.compat.postprocess import (
    kv_postprocess_blksize_and_layout_on_receive as kv_postprocess_blksize_and_layout_on_receive,
)
from kvcache.compat.postprocess import (
    kv_postprocess_blksize_on_receive as kv_postprocess_blksize_on_receive,
)
from kvcache.compat.postprocess import (
    kv_postprocess_layout_on_receive as kv_postprocess_layout_on_receive,
)
from kvcache.compat.requests import yield_req_data as yield_req_data
from kvcache.compat.sequences.block_space_manager import BlockSpaceManager as BlockSpaceManager
from kvcache.compat.sequences.demand import AllocStatus as AllocStatus
from kvcache.compat.topology import KVTopology as KVTopology
from kvcache.compat.topology import RemoteEngine as RemoteEngine
