"""vLLM's OffloadingConnector over kvcache's host tier, in which a load may fail."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as of_vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from kvcache.integrations.vllm.offloading.options import HostTierOptions

_MODULE = "kvcache.integrations.vllm.offloading"
_SPEC = "KVCacheOffloadingSpec"


class OffloadingConnector(of_vllm.OffloadingConnector):
    """As vLLM's, with kvcache's spec.

    vLLM's takes every load for a success. Here a load that fails is a miss: its request computes the
    tokens anew (`kv_load_failure_policy` is set to "recompute"), and what could not be loaded is
    forgotten. ValueError or TypeError for wrong options.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        for name, own in ("spec_name", _SPEC), ("spec_module_path", _MODULE):
            if extra.setdefault(name, own) != own:
                raise ValueError(
                    f"{name} is {extra[name]!r}: expected {own!r} with {_MODULE}, or "
                    "kv_transfer_config without kv_connector_module_path"
                )
        HostTierOptions.of(extra)
        transfer.kv_load_failure_policy = "recompute"
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_worker is not None:
            self.connector_worker.spec.loads_may_fail = True
        if self.connector_scheduler is not None:
            self.connector_scheduler.manager.chained_groups = frozenset(
                group
                for group, each in enumerate(kv_cache_config.kv_cache_groups)
                if isinstance(each.kv_cache_spec, FullAttentionSpec)
                and each.kv_cache_spec.sliding_window is None
            )

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has arrived, and whose loads failed."""
        worker = self.connector_worker
        request_of = dict(worker._load_jobs)
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= {request_of[job] for job in worker.worker.take_failed_loads()}
        return results

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """As vLLM's; what a failed load was to bring is no hit any more, and its request loads no more.

        vLLM's scheduler keeps blocks back for such a request as for one that computes. Another load of
        it could wait for these for ever.
        """
        scheduler = self.connector_scheduler
        for request_id in connector_output.failed_recving:
            status = scheduler._req_status.get(request_id)
            if status is None:
                continue
            status.max_load_tokens = 0
            for job_id in status.transfer_jobs:
                if not scheduler._jobs[job_id].is_store:
                    scheduler.manager.distrust(scheduler._jobs[job_id].keys)
        super().update_connector_output(connector_output)
