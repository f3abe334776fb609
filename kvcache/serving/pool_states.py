"""The blocks of a pool by state: for figures and pages that show a cache at work."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from kvcache.allocator import KVCacheManager
from kvcache.checks import instance, shown


class PoolStates(NamedTuple):
    """How many blocks are in each state; the null block is not counted."""

    held: int  # by sequences, and no hits
    held_cached: int  # by sequences, and hits for others
    cached: int  # free to be taken, and hits until then
    empty: int  # free, no hits


def pool_states(manager: KVCacheManager, medium: Literal["gpu", "cpu"] = "gpu") -> PoolStates:
    """Of the device's pool or the host's; looks at every block, so not for each step of a large one.

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
    is_cached = manager.hashes_of_blocks(ids, medium).groups >= 0
    masks = (
        *(is_held & ~is_cached, is_held & is_cached),
        *(~is_held & is_cached, ~is_held & ~is_cached),
    )
    return PoolStates(*(int(mask.sum()) for mask in masks))
