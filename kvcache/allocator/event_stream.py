"""Events as the native log has them, one per block, put together into those that are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

_STORED, _REMOVED, _CLEARED = 0, 1, 2


def events_of(native: tuple, block_sizes: Sequence[int]) -> list[CacheEvent]:
    """`native`: (kinds, groups, hashes, parents, tokens of the stored ones, one after the other)."""
    kinds, groups, hashes, parents, tokens = native
    told: list[CacheEvent] = []
    token = 0
    for first, stop in _runs(kinds, groups, hashes, parents):
        kind, group = int(kinds[first]), int(groups[first])
        if kind == _CLEARED:
            told.append(AllBlocksCleared())
        elif kind == _REMOVED:
            told.append(BlockRemoved(hashes[first:stop], group))
        else:
            size = block_sizes[group]
            end = token + (stop - first) * size
            parent = parents[first].tobytes()
            told.append(BlockStored(hashes[first:stop], parent, tokens[token:end], size, group))
            token = end
    return told


def _runs(
    kinds: np.ndarray, groups: np.ndarray, hashes: np.ndarray, parents: np.ndarray
) -> Iterator[tuple[int, int]]:
    """(first, stop) of events that are told as one: of one kind and group, stored ones in a chain."""
    if len(kinds) == 0:
        return
    same = (kinds[1:] == kinds[:-1]) & (groups[1:] == groups[:-1]) & (kinds[1:] != _CLEARED)
    chained = (parents[1:] == hashes[:-1]).all(axis=1) | (kinds[1:] != _STORED)
    breaks = np.flatnonzero(~(same & chained)) + 1
    yield from zip([0, *breaks.tolist()], [*breaks.tolist(), len(kinds)])
