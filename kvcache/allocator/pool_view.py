# SPDX-License-Identifier: Apache-2.0
"""A read-only view of a manager's block pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvcache.native.load import core


def _count(name: str, doc: str) -> property:
    def read(view: PoolView) -> int:
        view._check()
        return getattr(view._pool, name)

    return property(read, doc=doc)


class PoolView:
    """Read-only block counts of a manager's pool."""

    def __init__(self, pool: core.BlockPool, check: Callable[[], None]) -> None:
        self._pool = pool
        # Raises an error in every thread except the manager's. This bound method also keeps the
        # manager alive.
        self._check = check

    num_blocks = _count("num_blocks", "Number of blocks, including the null block.")
    num_total = _count("num_total", "Number of blocks, excluding the null block.")
    num_free = _count("num_free", "Blocks that no request holds, cached or not.")
    num_cached = _count("num_cached", "Cached blocks, held or free.")
    num_evicted = _count("num_evicted", "Number of evictions of cached blocks so far.")
    num_pinned = _count("num_pinned", "Cached blocks that sessions have pinned.")
    peak_used = _count("peak_used", "Maximum number of blocks held at a time.")
    num_bytes = _count(
        "num_bytes", "Bytes of the pool's data structures once every block has been used."
    )

    def ref_counts(self, ids: np.ndarray | Sequence[int]) -> np.ndarray:
        """Return the reference count of each block, int32[n]."""
        self._check()
        return self._pool.ref_counts(ids)


class DevicePoolView(PoolView):
    """Block counts of the device pool, including counts of loading, kept and fenced blocks."""

    def __init__(self, manager: core.Manager) -> None:
        super().__init__(manager.pool, manager.check_reader)
        self._manager = manager

    @property
    def num_loading(self) -> int:
        """Number of blocks being loaded from the host by steps that are not reported yet."""
        return self._manager.num_loading

    @property
    def num_kept(self) -> int:
        """Number of block references that are held until `KVCacheManager.release_blocks`."""
        return self._manager.num_kept

    @property
    def num_fenced(self) -> int:
        """Number of block references that are held until a report (`fence_frees`)."""
        return self._manager.num_fenced
