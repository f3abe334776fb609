# SPDX-License-Identifier: Apache-2.0
"""What the scheduler, the host tier and disaggregation read of vLLM's private names, and why.

A release of vLLM may rename these without notice. `kvcache_vllm.sanitizer.runners` is the same for the
sanitizer, and `kvcache_vllm.steady`, which is used only with known sources, has the names of the
methods that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.request import Request


def token_ids(request: Request) -> list[int]:
    """`Request._all_token_ids`, because native code reads lists, and `all_token_ids` is another type."""
    return request._all_token_ids


def output_token_ids(request: Request) -> list[int]:
    """`Request._output_token_ids`, because steady steps append to the list."""
    return request._output_token_ids


def block_hasher(request: Request) -> Callable | None:
    """`Request._block_hasher`, whose attribute `span` says after which tokens it must be called. The
    public `update_block_hashes` has to be called after each token.
    """
    return request._block_hasher


def set_block_hash(block: KVCacheBlock, block_hash: BlockHashWithGroupId) -> None:
    """`KVCacheBlock._block_hash`, because vLLM 0.32 and 0.33 have different setters."""
    block._block_hash = block_hash


def combined_connectors(connector: Any) -> Sequence[Any] | None:
    """`MultiConnector._connectors`, which no method returns. None: not a MultiConnector."""
    return getattr(connector, "_connectors", None)


def transfer_config(connector: Any) -> Any:
    """`KVConnectorBase_V1._kv_transfer_config`: a MultiConnector gives each connector its own."""
    return connector._kv_transfer_config


def bounding_groups(connector: Any) -> tuple[int, ...]:
    """`OffloadingConnector._bounding_group_ids`: only these connectors ask vLLM's coordinator."""
    return getattr(connector, "_bounding_group_ids", ())


def requests_of_loads(connector_worker: Any) -> dict[int, str]:
    """`OffloadingConnectorWorker._load_jobs`, because results name requests, and the host tier jobs."""
    return dict(connector_worker._load_jobs)


def request_status(connector_scheduler: Any, request_id: str) -> Any | None:
    """`OffloadingConnectorScheduler._req_status`, because vLLM has no call for a failed load."""
    return connector_scheduler._req_status.get(request_id)


def transfer_jobs(connector_scheduler: Any) -> Mapping[int, Any]:
    """`OffloadingConnectorScheduler._jobs`, for the keys of the chunks that could not be loaded."""
    return connector_scheduler._jobs


def isa_of_cpu_kernel(dtype: torch.dtype, block_size: int, head_size: int, cache_dtype: str) -> str:
    """`cpu_attn._get_attn_isa`, because vLLM stores the result only in its metadata builders."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(dtype, block_size, head_size, cache_dtype)


def write_to_cpu_cache(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, isa: str
) -> None:
    """`_custom_ops.cpu_attn_reshape_and_cache`: only a write shows how a kernel orders a block."""
    from vllm import _custom_ops

    _custom_ops.cpu_attn_reshape_and_cache(key, value, *cache.chunk(2, dim=2), slots, isa)
