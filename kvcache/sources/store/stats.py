# SPDX-License-Identifier: Apache-2.0
"""The counts that a store tier reports."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.sources.base import LoadStats


@dataclass
class StoreStats(LoadStats):
    """The counts that a store tier has accumulated since its creation. Blocks of different groups
    count separately.

    With several ranks, a block that is put counts once. The lookups, loaded blocks, evictions and
    errors of each rank count separately, as do bytes.
    """

    lookups: int = 0
    """Number of requests looked up in the store."""

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
    """Number of lookups and loads abandoned at their deadline, plus other calls that exceeded
    theirs.
    """

    unasked: int = 0
    """Number of lookups skipped while the store was considered dead."""
