# SPDX-License-Identifier: Apache-2.0
"""Public names, which `__init__.py` imports on first use."""

from kvcache.compat.kv_transfer.aggregate import KVConnectorOutput as KVConnectorOutput
from kvcache.compat.kv_transfer.aggregate import KVOutputAggregator as KVOutputAggregator
from kvcache.compat.kv_transfer.cache_events import KVCacheEvents as KVCacheEvents
from kvcache.compat.kv_transfer.connector_calls import (
    get_kv_connector_cache_layout as get_kv_connector_cache_layout,
)
from kvcache.compat.kv_transfer.connector_calls import yield_req_data as yield_req_data
from kvcache.compat.kv_transfer.kv_blocks import copy_kv_blocks as copy_kv_blocks
from kvcache.compat.kv_transfer.postprocess import (
    kv_postprocess_blksize_and_layout_on_receive as kv_postprocess_blksize_and_layout_on_receive,
)
from kvcache.compat.kv_transfer.postprocess import (
    kv_postprocess_blksize_on_receive as kv_postprocess_blksize_on_receive,
)
from kvcache.compat.kv_transfer.postprocess import (
    kv_postprocess_layout_on_receive as kv_postprocess_layout_on_receive,
)
from kvcache.compat.kv_transfer.topology import KVTopology as KVTopology
from kvcache.compat.kv_transfer.topology import RemoteEngine as RemoteEngine
from kvcache.compat.kv_transfer.topology import TpKVTopology as TpKVTopology
