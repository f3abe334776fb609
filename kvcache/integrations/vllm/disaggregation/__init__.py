"""Prefill and decode in two vLLM engines, blocks going from the one's pool into the other's:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVCacheConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "kvcache.integrations.vllm.disaggregation"}'

The other engine has `"kv_role": "kv_consumer"`. Options go by `kv_connector_extra_config`; they are the
fields of `Options`.
"""

from kvcache.integrations.vllm.versions import check_version

check_version()  # before anything of vLLM is imported that another version may not have

from kvcache.integrations.vllm.disaggregation.connector import KVCacheConnector  # noqa: E402
from kvcache.integrations.vllm.disaggregation.options import Options  # noqa: E402

__all__ = ["KVCacheConnector", "Options"]
