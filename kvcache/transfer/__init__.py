"""Transfers between engines: topology, transfer plans, copied and received blocks, workers' reports.

Names are imported when first used, so plans and topology work without torch. Functions that move bytes
import it.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

_HOME = {
    "CacheDescription": "kvcache.transfer.description",
    "ReceivePermutation": "kvcache.transfer.plan.transfer_plan",
    "TransferPlan": "kvcache.transfer.plan.transfer_plan",
    "plan_transfer": "kvcache.transfer.plan.transfer_plan",
    "StateDescription": "kvcache.transfer.states",
    "StateTensor": "kvcache.transfer.states",
    "StateTransferPlan": "kvcache.transfer.states",
    "plan_states": "kvcache.transfer.states",
    "Fetch": "kvcache.transfer.fetching",
    "GroupFetch": "kvcache.transfer.fetching",
    "fetch": "kvcache.transfer.fetching",
    "plan_range": "kvcache.transfer.plan.token_range",
    "Spans": "kvcache.transfer.transport.spans",
    "Transfer": "kvcache.transfer.transport.base",
    "TransferError": "kvcache.transfer.transport.base",
    "Transport": "kvcache.transfer.transport.base",
    "make_transport": "kvcache.transfer.transport.base",
    "source_readers": "kvcache.transfer.plan.readers",
    "copy_kv_blocks": "kvcache.transfer.blocks",
    "permute_pages": "kvcache.transfer.memory",
    "region_addresses": "kvcache.transfer.memory",
    "AttentionBackend": "kvcache.layouts",
    "KVCacheEvents": "kvcache.transfer.connector.cache_events",
    "KVConnectorOutput": "kvcache.transfer.connector.aggregate",
    "KVOutputAggregator": "kvcache.transfer.connector.aggregate",
    "KVTopology": "kvcache.transfer.topology",
    "RemoteEngine": "kvcache.transfer.topology",
    "backend": "kvcache.layouts",
    "choose_layout": "kvcache.layouts",
    "register_backend": "kvcache.layouts",
    "kv_postprocess_blksize_and_layout_on_receive": "kvcache.transfer.receive",
    "kv_postprocess_blksize_on_receive": "kvcache.transfer.receive",
    "kv_postprocess_layout_on_receive": "kvcache.transfer.receive",
    "permute_received_blocks": "kvcache.transfer.receive",
    "heads_of_rank": "kvcache.transfer.sharding",
    "layers_of_rank": "kvcache.transfer.sharding",
    "ranks_of_head": "kvcache.transfer.sharding",
    "replica_for": "kvcache.transfer.sharding",
    "yield_req_data": "kvcache.transfer.connector.requests",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME)
