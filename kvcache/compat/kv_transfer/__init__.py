# SPDX-License-Identifier: Apache-2.0
"""vLLM's helpers for KV transfers (`vllm/distributed/kv_transfer/kv_connector/utils.py`), over
`kvcache.transfer`, `kvcache.layouts` and `kvcache.worker`.

A caller replaces `from vllm.distributed.kv_transfer.kv_connector.utils import` by
`from kvcache.compat.kv_transfer import`. Only the functions that move bytes import torch.

| there | here |
|---|---|
| `KVOutputAggregator(expected_finished_count)`, `from_connector(connector, world_size)`, `aggregate(outputs, output_rank)` | the same; if the output of `output_rank` is empty, the reports of other workers are kept for the next call |
| `vllm.v1.outputs.KVConnectorOutput`, or any class with its fields | the same; an attribute that the aggregator does not know must be empty |
| `copy_kv_blocks(src_kv_caches, dst_kv_caches, src_block_ids, dst_block_ids, direction)` | the same; lists of different lengths raise an error. `backend=` if the first two dimensions are both 2 |
| `kv_postprocess_blksize_on_receive(cache, indices, block_size_ratio)`, `kv_postprocess_layout_on_receive(cache, indices)`, `kv_postprocess_blksize_and_layout_on_receive(cache, indices, block_size_ratio)` | the same, or with a list of all layers; strides must be those of the function. K and V in one tensor [blocks, 2, ...]: `list(cache.unbind(1))` |
| `yield_req_data(scheduler_output)` | the same |
| `get_kv_connector_cache_layout()` asks the connector of the process's configuration | `get_kv_connector_cache_layout(connector, vllm_config)`: a library has no such configuration |
| `TpKVTopology(tp_rank, remote_tp_size, is_mla, total_num_kv_heads, attn_backend, engine_id, remote_block_size, tensor_shape)` | the same; `tp_ratio` is negative if the remote side is larger, heads are replicated only over more ranks than heads, and `get_target_remote_ranks` returns `(global_rank, pp_rank, tp_rank)` |
| `TransferTopology`, `EngineTransferInfo` of newer versions | `KVTopology` with ranks and sizes of pipelines; `with_remote(engine_id, RemoteEngine(...))` |

>>> topology = TpKVTopology(0, {"a": 1, "b": 2}, False, 8, "FLASH_ATTN", "a", {"a": 32, "b": 16})
>>> topology.get_target_remote_ranks_from_engine_id("b"), topology.block_size_ratio(16)
([(0, 0, 0), (1, 0, 1)], 2)
>>> get_kv_connector_cache_layout()
'NHD'
"""  # noqa: E501

from __future__ import annotations

from kvcache.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
