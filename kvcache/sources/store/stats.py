"""The counts of a store tier."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.sources.base import LoadStats


@dataclass
class StoreStats(LoadStats):
    """Counts since the tier was created. Blocks are counted per group."""

    lookups: int = 0
    """Requests looked up in the store."""

    loaded_blocks: int = 0
    """Blocks that arrived with a correct digest."""

    loaded_bytes: int = 0
    """Bytes of the blocks that arrived."""

    missing_blocks: int = 0
    """Blocks that the store had lost by the time they were loaded."""

    corrupt_blocks: int = 0
    """Blocks with a wrong digest."""

    misfit_blocks: int = 0
    """Blocks with another size, key or fingerprint."""

    stored_blocks: int = 0
    """Blocks put into the store."""

    stored_bytes: int = 0
    """Bytes of the blocks put into the store."""

    known_blocks: int = 0
    """Blocks not put, because the store already had them."""

    refused_blocks: int = 0
    """Blocks rejected because the store is full."""

    dropped_blocks: int = 0
    """Blocks not put, because the cache evicted them first or too many were waiting."""

    evicted_blocks: int = 0
    """Blocks evicted by the store, if it reports them."""

    errors: int = 0
    """Failed calls of the store."""

    timeouts: int = 0
    """Lookups and loads abandoned at their deadline, and other calls that took longer."""

    unasked: int = 0
    """Lookups skipped while the store was considered dead."""
