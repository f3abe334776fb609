# SPDX-License-Identifier: Apache-2.0
"""The worker side of the connector: registers caches, keeps leases, and loads blocks in a thread."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kvcache.plugins.disaggregation.fetching import RankReader, RequestFetch
from kvcache.plugins.vllm.disaggregation.layout import layout_of_group
from kvcache.plugins.vllm.disaggregation.options import Options
from kvcache.plugins.vllm.disaggregation.steps import Handshake, TransferMetadata
from kvcache.sources.disaggregation.layout import BY_TOKEN, GroupLayout
from kvcache.sources.disaggregation.rank import RankThread
from kvcache.sources.disaggregation.steps import Results
from kvcache.transfer.transport.base import Transport
from kvcache.transfer.transport.factory import make_transport
from kvcache.worker.pages.pages import Pages

# Environment variable with the secret that peers need to connect.
SECRET = "KVCACHE_TRANSFER_SECRET"


class TransferWorker:
    """The caches of one rank, and the thread that loads blocks into them and serves them to peers."""

    def __init__(
        self, options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        self._options, self._config, self._cache = options, vllm_config, kv_cache_config
        self._thread: RankThread | None = None
        self._transport: Transport | None = None
        self._storages: list[torch.Tensor] = []
        self._is_registered = False
        self.handshake: Handshake | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register the caches by layer, and start to listen. Raises ValueError for an unknown layout."""
        groups = self._cache.kv_cache_groups
        chosen = [
            [kv_caches[name] for name in groups[group].layer_names]
            for group in self._cache.transfer_group_ids
        ]
        layouts = [
            self._layout(groups[group], tensors)
            for group, tensors in zip(self._cache.transfer_group_ids, chosen)
        ]
        rank = get_tensor_model_parallel_rank()
        transport = make_transport(
            f"{self._config.kv_transfer_config.engine_id}/{rank}",
            self._options.transport,
            host=self._options.host,
            port=self._options.port_of(rank),
            advertise=self._options.advertise,
            secret=os.environ.get(SECRET, "").encode(),
            digest=self._options.digest,
        )
        self._transport, self._storages = transport, _storages(kv_caches.values())
        storages = self._storages
        self._register_storages()
        self._is_registered = True
        addresses = tuple(tuple(each.data_ptr() for each in tensors) for tensors in chosen)
        begins = np.array(sorted(storage.data_ptr() for storage in storages))
        reader = RankReader(transport, layouts, addresses, rank, begins, storages[0].device)
        self._thread = RankThread(
            reader,
            layouts,
            addresses,
            lambda load: RequestFetch(reader, load, self._options.timeout_s),
        )
        own = self._thread.handshake
        self.handshake = Handshake(own.groups, own.address)

    def unregister(self) -> None:
        """Withdraw the caches' memory from the transport, before vLLM unmaps it.

        Offers remain valid addresses, but peers that read them fail until `restore`, and recompute.
        """
        if self._is_registered:
            self._thread.call(self._unregister_storages)
            self._is_registered = False

    def restore(self) -> None:
        """Register the caches again, after vLLM has mapped memory at the same addresses."""
        if self._thread is not None and not self._is_registered:
            self._thread.call(self._restore_storages)
            self._is_registered = True

    def _register_storages(self) -> None:
        for storage in self._storages:
            self._transport.register(Pages.over([storage.view(1, -1)]))

    def _restore_storages(self) -> None:
        self._register_storages()
        for peer in self._transport.peers():  # connected without this memory
            self._transport.disconnect(peer)

    def _unregister_storages(self) -> None:
        for storage in self._storages:
            self._transport.unregister(Pages.over([storage.view(1, -1)]))

    def begin(self, step: TransferMetadata) -> None:
        """Start the transfers that the scheduler side has decided."""
        self._thread.begin(step)

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Return the requests sent, received, and failed to receive since the last call.

        A failed request is reported once the transport no longer writes to its blocks.
        """
        found = self._thread.take_results() if self._thread is not None else Results()
        return found.sent, found.received | found.released, found.released

    def close(self) -> None:
        """Stop the thread and the transport."""
        if self._thread is not None:
            self._thread.close()

    def _layout(self, group: KVCacheGroupSpec, tensors: list[torch.Tensor]) -> GroupLayout:
        spec, model = group.kv_cache_spec, self._config.model_config
        is_mla = "MLA" in type(spec).__name__
        sizes = spec.head_size, getattr(spec, "head_size_v", None) or spec.head_size
        has_both = not is_mla and tensors[0].shape[-1] == sum(sizes)  # K and V, and no scales
        interior = BY_TOKEN
        if current_platform.is_cpu() and not is_mla:
            # vLLM keeps the kernels' ISA in the metadata builders; this function exists in 0.32.
            from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

            dtype = self._config.cache_config.cache_dtype
            interior = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, dtype)
        return layout_of_group(
            group.layer_names,
            tensors,
            engine_id=self._config.kv_transfer_config.engine_id,
            num_blocks=self._cache.num_blocks,
            total_num_kv_heads=model.get_total_num_kv_heads(),
            tp_size=self._config.parallel_config.tensor_parallel_size,
            is_mla=is_mla,
            head_size=sizes[0] if has_both else None,
            interior=interior,
        )


def _storages(tensors) -> list[torch.Tensor]:
    """Return the memory of the tensors as bytes, each allocation once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            storage
        )
    return list(found.values())
