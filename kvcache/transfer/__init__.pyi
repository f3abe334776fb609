# SPDX-License-Identifier: Apache-2.0
"""Public names, which `__init__.py` imports on first use."""

from kvcache.layouts import AttentionBackend as AttentionBackend
from kvcache.layouts import backend as backend
from kvcache.layouts import choose_layout as choose_layout
from kvcache.layouts import register_backend as register_backend
from kvcache.transfer.description import CacheDescription as CacheDescription
from kvcache.transfer.fetching import Fetch as Fetch
from kvcache.transfer.fetching import GroupFetch as GroupFetch
from kvcache.transfer.fetching import fetch as fetch
from kvcache.transfer.memory import permute_pages as permute_pages
from kvcache.transfer.memory import region_addresses as region_addresses
from kvcache.transfer.plan.readers import source_readers as source_readers
from kvcache.transfer.plan.token_range import plan_range as plan_range
from kvcache.transfer.plan.transfer_plan import ReceivePermutation as ReceivePermutation
from kvcache.transfer.plan.transfer_plan import TransferPlan as TransferPlan
from kvcache.transfer.plan.transfer_plan import plan_transfer as plan_transfer
from kvcache.transfer.receive import permute_received_blocks as permute_received_blocks
from kvcache.transfer.sharding import heads_of_rank as heads_of_rank
from kvcache.transfer.sharding import layers_of_rank as layers_of_rank
from kvcache.transfer.sharding import ranks_of_head as ranks_of_head
from kvcache.transfer.sharding import replica_for as replica_for
from kvcache.transfer.states import StateDescription as StateDescription
from kvcache.transfer.states import StateTensor as StateTensor
from kvcache.transfer.states import StateTransferPlan as StateTransferPlan
from kvcache.transfer.states import plan_states as plan_states
from kvcache.transfer.transport.base import Transfer as Transfer
from kvcache.transfer.transport.base import TransferError as TransferError
from kvcache.transfer.transport.base import Transport as Transport
from kvcache.transfer.transport.spans import Spans as Spans
