# SPDX-License-Identifier: Apache-2.0
"""Counts a pool's blocks by state, for statistics and for web pages that visualize a cache."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from kvcache.allocator import KVCacheManager
from kvcache.checks import instance, shown


class PoolStates(NamedTuple):
    """The number of blocks in each state, excluding the null block."""

    held: int  # blocks held by sequences and not cached
    held_cached: int  # blocks held by sequences and cached
    cached: int  # cached blocks that can be evicted
    empty: int  # free blocks that are not cached


def pool_states(manager: KVCacheManager, medium: Literal["gpu", "cpu"] = "gpu") -> PoolStates:
    """Count blocks by state in the device or host pool. The function visits every block, so do not call
    it in every step.

    >>> from kvcache import Request
    >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128, num_preallocate_tokens=0)
    >>> plan = manager.step(new=[Request("r1", range(40))])
    >>> pool_states(manager)
    PoolStates(held=1, held_cached=2, cached=0, empty=5)
    """
    instance(manager, KVCacheManager, "manager")
    pools = {"gpu": manager.pool}
    if manager.host_pool is not None:
        pools["cpu"] = manager.host_pool
    if not isinstance(medium, str) or medium not in pools:
        raise ValueError(f"medium is {shown(medium)}: expected {' or '.join(map(repr, pools))}")
    pool = pools[medium]
    ids = np.arange(1, pool.num_blocks)
    is_held = pool.ref_counts(ids) > 0
    is_cached = manager.cache.hashes_of(ids, medium).groups >= 0
    masks = (
        *(is_held & ~is_cached, is_held & is_cached),
        *(~is_held & is_cached, ~is_held & ~is_cached),
    )
    return PoolStates(*(int(mask.sum()) for mask in masks))
