# SPDX-License-Identifier: Apache-2.0
"""Uses kvcache's host tier for vLLM's KV offloading:

vllm serve MODEL --kv-transfer-config '{
    "kv_connector": "OffloadingConnector",
    "kv_connector_module_path": "kvcache_vllm.offloading",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824, "eviction": "lru"}}'
"""

from kvcache_vllm.offloading.connector import OffloadingConnector
from kvcache_vllm.offloading.host_manager import HostManager
from kvcache_vllm.offloading.host_worker import HostWorker
from kvcache_vllm.offloading.options import HostTierOptions
from kvcache_vllm.offloading.spec import KVCacheOffloadingSpec

__all__ = [
    "HostManager",
    "HostTierOptions",
    "HostWorker",
    "KVCacheOffloadingSpec",
    "OffloadingConnector",
]
