# SPDX-License-Identifier: Apache-2.0
"""Attention with FlashInfer's kernels, which read pages in place instead of gathering contexts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvcache.assembly import KVCache
from kvcache.worker import AttentionMetadata, AttentionMetadataBuilder
from kvcache_serve.engine.batch import Batch
from kvcache_serve.engine.transformers.layer_places import Place

_KINDS = ("full_attention", "sliding_window")
_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_SIZES = (64, 128, 256)
_WORKSPACE_BYTES = 128 * 2**20  # workspace size that FlashInfer recommends


class _Shape(NamedTuple):
    """The inputs of a FlashInfer plan that do not depend on the batch."""

    group: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float | None
    softcap: float | None
    dtype: torch.dtype


class FlashInferAttention:
    """Attention over pages for the layers that FlashInfer supports.

    FlashInfer supports full attention and sliding windows without sinks. K and V must have the same
    head size, the model must use half precision, and K and V must be stored in the model's dtype.
    `serves` returns whether a layer is supported.
    """

    def __init__(
        self,
        cache: KVCache,
        places: dict[int, Place],
        layers_with_sinks: set[int],
        model_dtype: torch.dtype,
    ) -> None:
        import flashinfer

        self._flashinfer = flashinfer
        self._places = {
            layer: place
            for layer, place in places.items()
            if layer not in layers_with_sinks and _is_served(cache, place, model_dtype)
        }
        # FlashInfer requires that this buffer is zeroed initially.
        self._workspace = torch.zeros(
            _WORKSPACE_BYTES, dtype=torch.uint8, device=cache.pages.device
        )
        groups = sorted({place.group for place in self._places.values()})
        self._builder = None
        if groups:
            self._builder = AttentionMetadataBuilder(cache.tables, groups=groups, flash_attn=False)
        # The bool in a key is True for a decode wrapper.
        self._wrappers: dict[tuple[_Shape, bool], object] = {}
        self._planned: set[_Shape] = set()  # shapes that were planned for the current batch
        self._metadata: AttentionMetadata | None = None
        self._batch: Batch | None = None

    def begin(self, batch: Batch | None) -> None:
        """Set the batch of the next forward pass, or None for no batch."""
        self._batch, self._metadata = batch, None
        self._planned.clear()

    def serves(self, layer: int) -> bool:
        """Return whether `attend` supports this layer."""
        return layer in self._places

    def attend(
        self, layer: int, query: torch.Tensor, scale: float | None, softcap: float | None
    ) -> torch.Tensor:
        """Compute the attention output [1, t, heads, size] for query [1, heads, t, size].

        The K and V of these tokens must already be in the pages.
        """
        storage, number, group = self._places[layer]
        keys, values = storage.key_cache(number), storage.value_cache(number)
        queries = query[0].transpose(0, 1).contiguous()
        _, num_heads, head_size = queries.shape
        shape = _Shape(
            group, num_heads, keys.shape[2], head_size, scale, softcap or None, queries.dtype
        )
        wrapper = self._planned_wrapper(shape, keys.dtype)
        return wrapper.run(queries, (keys, values))[None]

    def _planned_wrapper(self, shape: _Shape, kv_dtype: torch.dtype) -> object:
        """Return the FlashInfer wrapper for a shape. All layers with the same shape share one plan per
        batch.
        """
        # The prefill kernels use tiles of 128 queries, so they are several times slower than the decode
        # kernels if each request has one query.
        decodes = bool((self._batch.query_lens == 1).all())
        key = shape, decodes
        if key not in self._wrappers:
            self._wrappers[key] = self._make_wrapper(decodes)
        wrapper = self._wrappers[key]
        if shape in self._planned:
            return wrapper
        if self._metadata is None:
            self._metadata = self._batch.metadata(self._builder)
        batch, pages = self._metadata, self._metadata[shape.group]
        wrapper.plan(
            *(() if decodes else (batch.query_start_loc_cpu,)),
            pages.paged_kv_indptr_cpu,
            pages.paged_kv_indices,
            pages.paged_kv_last_page_len_cpu,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_size,
            pages.block_size,
            **({} if decodes else {"causal": True}),
            sm_scale=shape.scale,
            window_left=-1 if pages.window is None else pages.window - 1,
            logits_soft_cap=shape.softcap,
            q_data_type=shape.dtype,
            kv_data_type=kv_dtype,
        )
        self._planned.add(shape)
        return wrapper

    def _make_wrapper(self, decodes: bool) -> object:
        if decodes:
            return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=True
            )
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")


def _is_served(cache: KVCache, place: Place, model_dtype: torch.dtype) -> bool:
    spec = cache.plan.groups[place.group]
    keys, values = place.storage.key_cache(place.layer), place.storage.value_cache(place.layer)
    return (
        spec.kind in _KINDS
        and keys.dtype == model_dtype
        and keys.dtype in _DTYPES
        and keys.shape == values.shape
        and keys.shape[-1] in _HEAD_SIZES
    )
