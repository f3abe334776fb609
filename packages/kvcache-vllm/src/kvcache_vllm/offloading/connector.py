# SPDX-License-Identifier: Apache-2.0
"""vLLM's OffloadingConnector with kvcache's host tier and support for failed loads."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as of_vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from kvcache_vllm import private
from kvcache_vllm.offloading.options import HostTierOptions

_MODULE = "kvcache_vllm.offloading"
_SPEC = "KVCacheOffloadingSpec"


def _choose_spec(extra: dict[str, Any]) -> None:
    for name, own in ("spec_name", _SPEC), ("spec_module_path", _MODULE):
        if extra.setdefault(name, own) != own:
            raise ValueError(
                f"{name} is {extra[name]!r}: expected {own!r} with {_MODULE}, or "
                "kv_transfer_config without kv_connector_module_path"
            )


class OffloadingConnector(of_vllm.OffloadingConnector):
    """vLLM's connector with kvcache's spec.

    vLLM's connector assumes that every load succeeds. This connector treats a failed load as a
    miss: the request recomputes the tokens (`kv_load_failure_policy` is set to "recompute"), and
    chunks that could not be loaded are discarded. Raises ValueError or TypeError for invalid
    options.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        _choose_spec(transfer.kv_connector_extra_config)
        HostTierOptions.of(transfer.kv_connector_extra_config)
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

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **options: Any) -> Any:
        """Create the metrics of kvcache's spec.

        The API server calls this method in a process without a connector, where the configuration
        does not name a spec.
        """
        _choose_spec(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().build_prom_metrics(vllm_config, *args, **options)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the completed transfers and the failed loads."""
        worker = self.connector_worker
        request_of = private.requests_of_loads(worker)
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= {request_of[job] for job in worker.worker.take_failed_loads()}
        return results

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Extend vLLM's method: discard the chunks of failed loads, and start no further loads for
        the requests.

        vLLM's scheduler reserves blocks for such a request as if it were running. A further load
        could wait for these blocks forever.
        """
        scheduler = self.connector_scheduler
        for request_id in connector_output.failed_recving:
            status = private.request_status(scheduler, request_id)
            if status is None:
                continue
            status.max_load_tokens = 0
            jobs = private.transfer_jobs(scheduler)
            for job_id in status.transfer_jobs:
                if not jobs[job_id].is_store:
                    scheduler.manager.distrust(jobs[job_id].keys)
        super().update_connector_output(connector_output)
