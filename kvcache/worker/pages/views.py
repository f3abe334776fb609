"""Caches of attention backends, seen as K and V."""

from __future__ import annotations

from itertools import pairwise

import torch

from kvcache.worker.pages.pages import Tensors


def both(key: torch.Tensor, value: torch.Tensor, dim: int) -> torch.Tensor:
    """One view of K and V of equal shape, stacked in dimension `dim`."""
    apart = (value.data_ptr() - key.data_ptr()) // key.element_size()
    shape, strides = list(key.shape), list(key.stride())
    shape.insert(dim, 2)
    strides.insert(dim, apart)
    return key.as_strided(shape, strides, key.storage_offset())


def stacked(caches: list[torch.Tensor]) -> torch.Tensor | None:
    """One view [num_layers, ...] of tensors of one memory at equal distances; None for others."""
    first = caches[0]
    starts = [cache.data_ptr() for cache in caches]
    steps = {later - earlier for earlier, later in pairwise(starts)}
    same = all(
        cache.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and cache.stride() == first.stride()
        for cache in caches
    )
    step = steps.pop() if steps else 0
    if not same or steps or step < 0 or step % first.element_size():
        return None
    strides = (step // first.element_size(), *first.stride())
    return first.as_strided((len(caches), *first.shape), strides, first.storage_offset())


def key_and_value(
    cache: Tensors, block_dim: int | None, name: str
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """K, V and the dimension of blocks of what an engine has for one layer."""
    if not isinstance(cache, torch.Tensor):
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
                "expected the same but for the last dimension"
            )
        return cache[0], cache[1], _first_dim(block_dim, name, cache[0])
    shape = list(cache.shape)
    if cache.ndim == 3:
        latent = cache.unsqueeze(2)
        return latent, latent[..., :0], _first_dim(block_dim, name, cache)
    if cache.ndim != 5 or 2 not in shape[:2]:
        raise ValueError(
            f"{name} has shape {shape}: expected [2, num_blocks, block_size, num_kv_heads, head_size], "
            "[num_blocks, 2, ...], [num_blocks, block_size, head_size] or a pair (K, V)"
        )
    if block_dim is None:
        if shape[:2] == [2, 2]:
            raise ValueError(
                f"{name} has shape {shape}, which may be either way round: expected block_dim, 0 or 1"
            )
        block_dim = 1 if shape[0] == 2 else 0
    if block_dim not in (0, 1) or shape[1 - block_dim] != 2:
        raise ValueError(
            f"block_dim is {block_dim}, {name} has shape {shape}: expected K and V in dimension "
            f"{1 - block_dim}"
        )
    key, value = cache.unbind(1 - block_dim)
    return key, value, block_dim


def _first_dim(block_dim: int | None, name: str, cache: torch.Tensor) -> int:
    if block_dim not in (None, 0):
        raise ValueError(
            f"block_dim is {block_dim}, {name} has shape {list(cache.shape)}: expected None or 0"
        )
    return 0
