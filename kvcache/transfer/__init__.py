# SPDX-License-Identifier: Apache-2.0
"""KV transfers between engines: cache descriptions, transfer plans, transports and received blocks.

Names are imported on first use, so plans do not need torch. Only functions that move bytes import
torch.
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
    "source_readers": "kvcache.transfer.plan.readers",
    "permute_pages": "kvcache.transfer.memory",
    "region_addresses": "kvcache.transfer.memory",
    "AttentionBackend": "kvcache.layouts",
    "backend": "kvcache.layouts",
    "choose_layout": "kvcache.layouts",
    "register_backend": "kvcache.layouts",
    "permute_received_blocks": "kvcache.transfer.receive",
    "heads_of_rank": "kvcache.transfer.sharding",
    "layers_of_rank": "kvcache.transfer.sharding",
    "ranks_of_head": "kvcache.transfer.sharding",
    "replica_for": "kvcache.transfer.sharding",
}

__all__ = [*_HOME]  # noqa: PLE0604

__getattr__, __dir__ = lazy_names(__name__, _HOME)
