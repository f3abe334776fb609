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
    """Counts of blocks. Only the manager changes the pool."""

    def __init__(self, pool: core.BlockPool, check: Callable[[], None]) -> None:
        self._pool = pool
        # Raises in a thread that is not the manager's. A method of the manager, which the pool needs.
        self._check = check

    num_blocks = _count("num_blocks", "Blocks, the null block counted.")
    num_total = _count("num_total", "Blocks without the null block.")
    num_free = _count("num_free", "Blocks without references, cached or not.")
    num_cached = _count("num_cached", "Blocks that are found under a hash, held or free.")
    num_evicted = _count("num_evicted", "Cached blocks taken for other content, so far.")
    num_pinned = _count("num_pinned", "Cached blocks that a session has pinned.")
    peak_used = _count("peak_used", "The most blocks that were held at a time.")
    num_bytes = _count("num_bytes", "Bytes of the pool itself when every block was used once.")

    def ref_counts(self, ids: np.ndarray | Sequence[int]) -> np.ndarray:
        """int32[n]: references of each block."""
        self._check()
        return self._pool.ref_counts(ids)
