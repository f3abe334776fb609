# SPDX-License-Identifier: Apache-2.0
"""Interfaces of other engines, implemented with kvcache: one module per interface, named for it.

A caller that was written for an interface changes its import line to the module. The docstring of each
module says what differs.

| module | interface |
|---|---|
| `vllm_block_table` | vLLM's `BlockTable` and `MultiGroupBlockTable` |
| `ascend_block_table` | the same of vLLM's NPU variant |
| `kv_transfer` | vLLM's helpers of KV connectors |
| `kv_cache_manager` | `KVCacheManager` of vLLM's first v1 engine |
| `block_space_manager` | `SelfAttnBlockSpaceManager` of vLLM's v0 engine |

The package also has the names that only one of the modules has. They are imported on first use. Only
block tables and the functions that copy data import torch.
"""

from __future__ import annotations

from kvcache.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
