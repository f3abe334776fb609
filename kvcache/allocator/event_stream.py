"""Joins the events of the native log, one per block, into the events that are emitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from kvcache.step import NO_IDS

_STORED, _REMOVED, _CLEARED = 0, 1, 2
_MEDIUMS = ("gpu", "cpu")


def events_of(native: tuple, block_sizes: Sequence[int]) -> list[CacheEvent]:
    """`native`: (kinds, mediums, groups, hashes, parents, tokens of those stored on the device)."""
    kinds, mediums, groups, hashes, parents, tokens = native
    emitted: list[CacheEvent] = []
    token = 0
    for first, stop in _runs(kinds, mediums, groups, hashes, parents):
        kind, group = int(kinds[first]), int(groups[first])
        medium = _MEDIUMS[mediums[first]]
        if kind == _CLEARED:
            emitted.append(AllBlocksCleared(medium))
        elif kind == _REMOVED:
            emitted.append(BlockRemoved(hashes[first:stop], group, medium))
        elif medium == "cpu":
            size = block_sizes[group]
            emitted.append(BlockStored(hashes[first:stop], None, NO_IDS, size, group, medium))
        else:
            size = block_sizes[group]
            end = token + (stop - first) * size
            parent = parents[first].tobytes()
            emitted.append(BlockStored(hashes[first:stop], parent, tokens[token:end], size, group))
            token = end
    return emitted


def _runs(
    kinds: np.ndarray,
    mediums: np.ndarray,
    groups: np.ndarray,
    hashes: np.ndarray,
    parents: np.ndarray,
) -> Iterator[tuple[int, int]]:
    """(first, stop) of events that are emitted as one: of one kind and group, stored ones in a chain."""
    if len(kinds) == 0:
        return
    same = (kinds[1:] == kinds[:-1]) & (groups[1:] == groups[:-1]) & (kinds[1:] != _CLEARED)
    same &= mediums[1:] == mediums[:-1]
    chained = (parents[1:] == hashes[:-1]).all(axis=1) | (kinds[1:] != _STORED) | (mediums[1:] != 0)
    breaks = np.flatnonzero(~(same & chained)) + 1
    yield from zip([0, *breaks.tolist()], [*breaks.tolist(), len(kinds)])
