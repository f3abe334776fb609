# SPDX-License-Identifier: Apache-2.0
"""Converts between a cache in an attention backend's format and views of K and V."""

from __future__ import annotations

import torch

from kvcache.checks import instance, integer, listed
from kvcache.layouts import AttentionBackend, backend_of_shape
from kvcache.worker.pages.pages import Tensors

_ROLES = ("block", "token", "head", "element")


def as_indexed(key: torch.Tensor, value: torch.Tensor, dims: tuple[str, ...]) -> Tensors:
    """Return K and V as one view with a backend's `dims`, or as a pair if their shapes differ."""
    sizes = dict(zip(_ROLES, key.shape))
    strides = dict(zip(_ROLES, key.stride()))
    if "kv" in dims:
        if key.shape != value.shape:
            return key, value
        sizes["kv"] = 2
        strides["kv"] = (value.data_ptr() - key.data_ptr()) // key.element_size()
    else:
        sizes["element"] += value.shape[3]  # V follows K
    shape, steps = ([each[role] for role in dims] for each in (sizes, strides))
    return key.as_strided(shape, steps, key.storage_offset())


def key_and_value(
    cache: Tensors, described: AttentionBackend | None, v_head_size: int | None, name: str
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Split a layer's cache into K and V, and return them with the index of its block dimension."""
    if not isinstance(cache, torch.Tensor):
        cache = listed(cache, name, "a tensor or a pair of tensors")
        for each in cache:
            instance(each, torch.Tensor, f"an entry of {name}")
        if len(cache) != 2 or any(each.ndim != 4 for each in cache):
            shapes = [list(each.shape) for each in cache]
            raise ValueError(
                f"{name} has shapes {shapes}: expected a pair (K, V) of "
                "[num_blocks, block_size, num_kv_heads, head_size]"
            )
        if cache[0].shape[:3] != cache[1].shape[:3] or cache[0].dtype != cache[1].dtype:
            kinds = [f"{each.dtype}{list(each.shape)}" for each in cache]
            raise ValueError(
                f"{name} has K of {kinds[0]} and V of {kinds[1]}: "
                "expected equal dtypes, and shapes that differ only in the last dimension"
            )
        return cache[0], cache[1], 0
    described = described or backend_of_shape(cache.shape, name)
    dims, shape = list(described.dims), list(cache.shape)
    if len(shape) != len(dims) or ("kv" in dims and shape[dims.index("kv")] != 2):
        wanted = ", ".join("2" if role == "kv" else role for role in dims)
        raise ValueError(
            f"{name} has shape {shape}: expected [{wanted}] of backend {described.name!r}"
        )
    block_dim = dims.index("block")
    if "head" not in dims:
        cache, dims = cache.unsqueeze(-1), [*dims, "head"]
    if "kv" in dims:
        caches = cache.unbind(dims.index("kv"))
        dims.remove("kv")
        split = None
    else:
        at, size = dims.index("element"), cache.shape[dims.index("element")]
        if v_head_size is None:
            v_head_size = size // 2 if described.unequal_head_sizes and not described.is_mla else 0
        v_head_size = integer(v_head_size, "v_head_size", 0, size - 1)
        split = size - v_head_size
        caches = cache.narrow(at, 0, split), cache.narrow(at, split, v_head_size)
    if v_head_size is not None:
        v_head_size = integer(v_head_size, "v_head_size")
    if split is None and v_head_size not in (None, caches[0].shape[dims.index("element")]):
        raise ValueError(
            f"v_head_size is {v_head_size}: expected None or the head size of K, "
            f"{caches[0].shape[dims.index('element')]}, for backend {described.name!r}"
        )
    key, value = (each.permute([dims.index(role) for role in _ROLES]) for each in caches)
    return key, value, block_dim
