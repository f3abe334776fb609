# SPDX-License-Identifier: Apache-2.0
"""The host tier as vLLM's `OffloadingSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingConfig,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)

from kvcache_vllm.offloading import metrics
from kvcache_vllm.offloading.host_manager import HostManager
from kvcache_vllm.offloading.host_worker import HostWorker
from kvcache_vllm.offloading.options import HostTierOptions


class KVCacheOffloadingSpec(OffloadingSpec):
    """Creates the manager for the scheduler and the `HostWorker` for a worker.

    Raises ValueError or TypeError for invalid options.
    """

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Return vLLM's metrics of a host tier and additional metrics."""
        return metrics.definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.options = HostTierOptions.of(self.extra_config)
        if config.canonical_layout:
            raise ValueError(
                "canonical_layout is true: expected false with kvcache's host tier, which stores each "
                "worker's bytes unchanged"
            )
        num_bytes = (
            config.worker_kv_bytes_per_block * config.parallel.world_size * self.blocks_per_chunk
        )
        self.num_chunks = self.options.cpu_bytes_to_use // max(num_bytes, 1)
        if self.num_chunks < 1:
            raise ValueError(
                f"cpu_bytes_to_use is {self.options.cpu_bytes_to_use}: expected at least {num_bytes}, "
                f"the bytes of a chunk of {self.blocks_per_chunk} blocks of all workers"
            )
        self.loads_may_fail = False  # kvcache's connector sets this to True
        self._manager: HostManager | None = None
        self._worker: HostWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """Return the scheduler side."""
        if self._manager is None:
            self._manager = HostManager(
                self.num_chunks,
                self.options,
                {
                    group.group_id: group.tokens_per_block * self.blocks_per_chunk
                    for group in self.config.groups
                },
                enable_events=self.kv_events_config.enable_kv_cache_events,
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker side.

        Raises ValueError if vLLM's own connector is used, because it does not support failed loads.
        """
        if not self.loads_may_fail:
            raise ValueError(
                "kv_transfer_config has no kv_connector_module_path: expected "
                "'kvcache_vllm.offloading', whose OffloadingConnector supports failed loads"
            )
        if self._worker is None:
            self._worker = HostWorker(kv_caches, self.num_chunks, self.blocks_per_chunk)
        return self._worker
