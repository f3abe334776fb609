# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode in two vLLM engines, with block transfers between their pools:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVCacheConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "kvcache_vllm.disaggregation"}'

The other engine is started with `"kv_role": "kv_consumer"`. Pass options, which are the fields of
`Options`, with `kv_connector_extra_config`.
"""

from kvcache_vllm.compatibility import check_version

check_version()  # before imports from vLLM that may fail in other versions

from kvcache_vllm.disaggregation.connector import KVCacheConnector  # noqa: E402
from kvcache_vllm.disaggregation.options import Options  # noqa: E402

__all__ = ["KVCacheConnector", "Options"]
