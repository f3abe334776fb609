# SPDX-License-Identifier: Apache-2.0
"""The worker side of the connector: registers caches, tracks leases, and loads blocks in a thread."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kvcache_exchange.disaggregation.layout import BY_TOKEN, VEC, GroupLayout
from kvcache_exchange.disaggregation.steps import Results
from kvcache_exchange.plugins.rank import TensorRank
from kvcache_vllm import private
from kvcache_vllm.disaggregation.layout import layout_of_group, scales_of
from kvcache_vllm.disaggregation.options import Options
from kvcache_vllm.disaggregation.steps import Handshake, TransferMetadata


class TransferWorker:
    """The caches of one rank, and the thread that loads blocks into them and serves them to peers."""

    def __init__(
        self, options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        self._options, self._config, self._cache = options, vllm_config, kv_cache_config
        self._rank: TensorRank | None = None
        self.handshake: Handshake | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Register each layer's cache, and start listening.

        Raises ValueError for an unknown layout.
        """
        groups = self._cache.kv_cache_groups
        chosen = [
            [kv_caches[name] for name in groups[group].layer_names]
            for group in self._cache.transfer_group_ids
        ]
        layouts = [
            self._layout(groups[group], tensors)
            for group, tensors in zip(self._cache.transfer_group_ids, chosen)
        ]
        self._rank = TensorRank(
            self._config.kv_transfer_config.engine_id,
            get_tensor_model_parallel_rank(),
            layouts,
            chosen,
            self._options,
            kv_caches.values(),
        )
        own = self._rank.handshake
        self.handshake = Handshake(own.groups, own.address, own.rank)

    def unregister(self) -> None:
        """Deregister the caches from the transport before vLLM unmaps their memory."""
        if self._rank is not None:
            self._rank.unregister()

    def restore(self) -> None:
        """Register the caches again after vLLM has mapped memory at the same addresses."""
        if self._rank is not None:
            self._rank.restore()

    def begin(self, step: TransferMetadata) -> None:
        """Start the transfers that the scheduler side has decided."""
        self._rank.begin(step)

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Return the requests that were sent, received, or could not be received since the last
        call.

        A request whose load failed is reported once the transport no longer writes to its blocks.
        """
        found = self._rank.take_results() if self._rank is not None else Results()
        return found.sent, found.received | found.released, found.released

    def close(self) -> None:
        """Stop the thread and the transport."""
        if self._rank is not None:
            self._rank.close()

    def _layout(self, group: KVCacheGroupSpec, tensors: list[torch.Tensor]) -> GroupLayout:
        spec, model = group.kv_cache_spec, self._config.model_config
        is_mla = "MLA" in type(spec).__name__
        sizes = spec.head_size, getattr(spec, "head_size_v", None) or spec.head_size
        has_both = not is_mla and tensors[0].shape[-1] == sum(sizes)  # K and V, and no scales
        scales = None
        if tensors[0].dtype.itemsize == 1:  # set when the weights were loaded
            attention = self._config.compilation_config.static_forward_context
            scales = scales_of(group.layer_names, attention)
        interior = BY_TOKEN
        if tensors[0].device.type == "cpu" and not is_mla:
            dtype = self._config.cache_config.cache_dtype
            isa = private.isa_of_cpu_kernel(spec.dtype, spec.block_size, spec.head_size, dtype)
            interior = interior_of_kernel(isa, spec.block_size, spec.head_size, spec.dtype)
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
            scales=scales,
        )


def interior_of_kernel(isa: str, block_size: int, head_size: int, dtype: torch.dtype) -> str:
    """Return the order in which a CPU kernel stores a block: `VEC`, or a text with the
    kernel's name for any other order.

    The order is determined by writing to a small cache, so that changes to the kernel are always
    detected.

    Args:
        isa: Name of the kernel.
        block_size: Tokens per block.
        head_size: Elements of K per head.
        dtype: Dtype of K and V.
    """
    other = f"kernel {isa}"  # never `VEC`, whatever the kernel's name
    values = (torch.arange(2 * block_size * head_size) % 251).to(dtype)  # exact in bfloat16
    key, value = values.view(2, block_size, 1, head_size)
    cache = torch.zeros(1, 1, 2 * block_size, head_size, dtype=dtype)
    try:
        private.write_to_cpu_cache(key, value, cache, torch.arange(block_size), isa)
    except (RuntimeError, TypeError):
        return other
    in_vec = torch.cat([key[:, 0].T.flatten(), value.flatten()])
    return VEC if torch.equal(cache.flatten(), in_vec) else other
