# SPDX-License-Identifier: Apache-2.0
"""Implements vLLM's connector interface for the scheduler side and the worker side."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvcache_vllm.disaggregation.options import Options
from kvcache_vllm.disaggregation.scheduling import Scheduling
from kvcache_vllm.disaggregation.steps import Handshake, TransferMetadata
from kvcache_vllm.disaggregation.windows import check_kinds
from kvcache_vllm.disaggregation.worker import TransferWorker

if TYPE_CHECKING:
    from vllm.config import CacheConfig, KVTransferConfig, ParallelConfig, VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KVCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefill in one engine and decode in another, with block transfers between their pools.

    Raises a one-line ValueError at startup for unsupported options and configurations.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        options = self.checked_options(
            transfer, vllm_config.parallel_config, vllm_config.cache_config
        )
        check_kinds(kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        # The scheduler reads this field after it has created the connector. With vLLM's default, a
        # failed load would abort the request.
        transfer.kv_load_failure_policy = options.on_failure
        if role == KVConnectorRole.SCHEDULER:
            self._scheduling = Scheduling(options, vllm_config, kv_cache_config)
            self._worker = None
        else:
            self._worker = TransferWorker(options, vllm_config, kv_cache_config)

    @staticmethod
    def checked_options(
        transfer: KVTransferConfig, parallel: ParallelConfig, cache: CacheConfig
    ) -> Options:
        """Return this connector's options.

        Raises:
            ValueError, TypeError: An option is invalid, or vLLM's configuration is not supported.
        """
        options = Options.from_config(
            transfer.kv_connector_extra_config, "kv_connector_extra_config"
        )
        _check_config(parallel, cache)
        return options

    # Scheduler side.

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Documented in vLLM's base class, like the other methods."""
        return self._scheduling.num_to_load(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduling.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TransferMetadata:
        return self._scheduling.take_step()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduling.take_output(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request, block_ids)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.finished(request, (block_ids,))

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Handshake]) -> None:
        self._scheduling.take_handshakes(metadata)

    def reset_cache(self) -> bool | None:
        """Called by `reset_prefix_cache(reset_connector=True)`, for example after the weights changed."""
        if self._worker is not None:
            return None
        self._scheduling.start_epoch()
        return True

    # Worker side.

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return True, because the caches are deregistered from the transport before they are
        unmapped.
        """
        return True

    def unregister_kv_caches(self) -> None:
        self._worker.unregister()

    def restore_kv_caches(self) -> None:
        self._worker.restore()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> Handshake | None:
        return self._worker.handshake

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads complete between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: peers read blocks directly from the cache."""

    def wait_for_save(self) -> None:
        """Do nothing, like `save_kv_layer`."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the finished transfers.

        A request whose load failed recomputes all of its blocks, even if there is only one group.
        """
        return KVConnectorTransferResults(*self._worker.take_results())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent, received, failed = self._worker.take_results()
        if failed:
            raise RuntimeError(
                f"loads of {sorted(failed)} failed: call get_transfer_results instead"
            )
        return sent, received

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _check_config(parallel: ParallelConfig, cache: CacheConfig) -> None:
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if (size := getattr(parallel, name)) != 1:
            raise ValueError(
                f"{name} is {size}: this connector supports only 1; only tensor parallelism may be larger"
            )
    if (
        cache.enable_prefix_caching
        and cache.prefix_caching_hash_algo.startswith("xxhash")
        and os.getenv("PYTHONHASHSEED") is None
    ):
        raise ValueError(
            f"prefix_caching_hash_algo is {cache.prefix_caching_hash_algo!r} and its seed is drawn at "
            "random: set PYTHONHASHSEED to the same value in all engines"
        )
