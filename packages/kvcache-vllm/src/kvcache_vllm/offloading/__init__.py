# SPDX-License-Identifier: Apache-2.0
"""Uses kvcache's host tier for vLLM's KV offloading:

vllm serve MODEL --kv-transfer-config '{
    "kv_connector": "OffloadingConnector",
    "kv_connector_module_path": "kvcache_vllm.offloading",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824, "eviction": "lru"}}'
"""

from kvcache_vllm.compatibility import check_version

check_version()  # before imports from vLLM that may fail in other versions

from kvcache_vllm.offloading.connector import OffloadingConnector  # noqa: E402
from kvcache_vllm.offloading.host_manager import HostManager  # noqa: E402
from kvcache_vllm.offloading.host_worker import HostWorker  # noqa: E402
from kvcache_vllm.offloading.options import HostTierOptions  # noqa: E402
from kvcache_vllm.offloading.spec import KVCacheOffloadingSpec  # noqa: E402

__all__ = [
    "HostManager",
    "HostTierOptions",
    "HostWorker",
    "KVCacheOffloadingSpec",
    "OffloadingConnector",
]
