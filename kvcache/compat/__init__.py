# SPDX-License-Identifier: Apache-2.0
"""Interfaces of other engines, implemented with kvcache: vLLM's block space manager, topology and
connector helpers.

Names are imported on first use. Only the functions that copy data import torch.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {
    "AllocStatus": "kvcache.compat.sequences.demand",
    "BlockTable": "kvcache.compat.block_tables",
    "BlockSpaceManager": "kvcache.compat.sequences.block_space_manager",
    "KVCacheEvents": "kvcache.compat.cache_events",
    "KVConnectorOutput": "kvcache.compat.aggregate",
    "KVOutputAggregator": "kvcache.compat.aggregate",
    "KVTopology": "kvcache.compat.topology",
    "MultiGroupBlockTable": "kvcache.compat.block_tables",
    "RemoteEngine": "kvcache.compat.topology",
    "copy_kv_blocks": "kvcache.compat.kv_blocks",
    "kv_postprocess_blksize_and_layout_on_receive": "kvcache.compat.postprocess",
    "kv_postprocess_blksize_on_receive": "kvcache.compat.postprocess",
    "kv_postprocess_layout_on_receive": "kvcache.compat.postprocess",
    "yield_req_data": "kvcache.compat.requests",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME)
