# SPDX-License-Identifier: Apache-2.0
"""The counts that a store tier reports."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.sources import LoadStats


@dataclass
class StoreStats(LoadStats):
    """Counts of a store tier since its creation. Blocks of different groups are counted separately.

    With several ranks, a block that is put is counted once. Lookups, loaded blocks, evictions,
    errors and bytes are counted for each rank separately.
    """

    lookups: int = 0
    """Number of requests whose blocks were looked up in the store."""

    loaded_blocks: int = 0
    """Number of blocks that arrived with a correct digest."""

    loaded_bytes: int = 0
    """Number of bytes in the blocks that arrived."""

    missing_blocks: int = 0
    """Number of blocks that the store had lost before they were loaded."""

    corrupt_blocks: int = 0
    """Number of blocks with a wrong digest."""

    misfit_blocks: int = 0
    """Number of blocks with a wrong size, key or fingerprint."""

    stored_blocks: int = 0
    """Number of blocks put into the store."""

    stored_bytes: int = 0
    """Number of bytes in the blocks put into the store."""

    known_blocks: int = 0
    """Number of blocks not put because the store already had them."""

    refused_blocks: int = 0
    """Number of blocks rejected because the store was full."""

    dropped_blocks: int = 0
    """Number of blocks not put because the cache evicted them first or because too many blocks were
    waiting.
    """

    evicted_blocks: int = 0
    """Number of blocks evicted by the store, if it reports evictions."""

    errors: int = 0
    """Number of failed calls to the store."""

    timeouts: int = 0
    """Number of lookups and loads abandoned at their deadline, plus the number of other calls that
    exceeded the timeout.
    """

    unasked: int = 0
    """Number of lookups skipped while the store was considered dead."""
