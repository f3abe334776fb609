"""What a store tier counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StoreStats:
    """Counts since the tier was made. Blocks are those of single groups."""

    lookups: int = 0
    """Requests for which the store was asked."""

    hit_tokens: int = 0
    """Tokens that the store was said to have, of requests whose load began."""

    loaded_tokens: int = 0
    """Those of them that arrived."""

    loaded_blocks: int = 0
    """Blocks that arrived, and were right."""

    loaded_bytes: int = 0
    """Bytes of these blocks."""

    missing_blocks: int = 0
    """Blocks that the store no longer had when they were to be loaded."""

    corrupt_blocks: int = 0
    """Blocks whose digest was wrong."""

    misfit_blocks: int = 0
    """Blocks of another size, or of another key or fingerprint."""

    stored_blocks: int = 0
    """Blocks that were put."""

    stored_bytes: int = 0
    """Bytes of these blocks."""

    known_blocks: int = 0
    """Blocks that were not put, as the store had them."""

    refused_blocks: int = 0
    """Blocks that the store did not take: it is full."""

    dropped_blocks: int = 0
    """Blocks that were to be put, and were not: they had left the cache before, or too many waited."""

    evicted_blocks: int = 0
    """Blocks that the store has evicted, where it says so."""

    errors: int = 0
    """Calls of the store that failed."""

    timeouts: int = 0
    """Lookups and loads that were given up at their deadline, and calls that took longer."""

    unasked: int = 0
    """Lookups that were answered without the store, which was taken for dead."""
