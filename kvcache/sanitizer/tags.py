# SPDX-License-Identifier: Apache-2.0
"""Tags of token prefixes, and the tags of all tokens of the observed requests.

The KV of a token depends on all tokens up to it, so the tag of a slot identifies a prefix: the tag
of token i is the seed of its request plus the sum of `mix(token, position)` over tokens 0 to i,
modulo 2**64. A step of many requests is therefore one cumulative sum.
"""

from __future__ import annotations

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TOKEN = np.uint64(0xD6E8FEB86659FD93)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = (np.uint64(count) for count in (30, 27, 31))


def mix(values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a pseudo-random uint64[n] for pairs of value and position (splitmix64)."""
    x = values.astype(np.uint64)
    x *= _TOKEN
    x += positions.astype(np.uint64) * _GOLDEN
    x ^= x >> _30
    x *= _FIRST
    x ^= x >> _27
    x *= _SECOND
    x ^= x >> _31
    return x


def name_hash(*names: object) -> int:
    """Return a hash below 2**63 that is the same in every process. Never 0."""
    text = "\0".join(f"{type(name).__name__}:{name}" for name in names)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1 | 1


class TagChains:
    """The tags of the tokens of each observed request, in one array.

    Request `i` owns `tags[offsets[i] : offsets[i] + capacities[i]]`: its seed, and then the tags of
    `lengths[i]` tokens.
    """

    def __init__(self) -> None:
        self.tags = np.zeros(1 << 12, np.uint64)
        self.offsets, self.capacities, self.lengths = (np.zeros(64, np.int64) for _ in range(3))
        self._used = 0
        self._free: list[int] = []
        self._num_rows = 0

    def add(self, seed: int) -> int:
        """Add a request without tokens and return its index. Indices are reused."""
        if self._free:
            index = self._free.pop()
        else:
            index, self._num_rows = self._num_rows, self._num_rows + 1
            for name in ("offsets", "capacities", "lengths"):
                setattr(self, name, grown(getattr(self, name), (self._num_rows,)))
        self.capacities[index] = self.lengths[index] = 0
        self._reserve(index, 64)
        self.tags[self.offsets[index]] = seed
        return index

    def remove(self, index: int) -> None:
        """Release the tags of a request."""
        self.capacities[index] = self.lengths[index] = 0
        self._free.append(index)

    def put(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, sums: np.ndarray
    ) -> None:
        """Set the tokens of requests from `starts` on, which drops all later tokens.

        Args:
            rows: int64[n]. Indices of requests, each once.
            starts: int64[n]. At most the number of known tokens.
            counts: int64[n]. Number of new tokens.
            sums: uint64[sum(counts)]. `mix` of each new token.
        """
        stops = starts + counts
        full = stops >= self.capacities[rows]
        if full.any():
            for i in np.flatnonzero(full).tolist():
                self._reserve(int(rows[i]), int(stops[i]) + 1)
        before = self.offsets[rows] + starts
        self.lengths[rows] = stops
        if len(sums) == 0:
            return
        if len(sums) == len(rows) and (counts == 1).all():
            self.tags[before + 1] = self.tags[before] + sums
            return
        first = np.cumsum(counts) - counts
        running = np.cumsum(sums)
        base = self.tags[before] - np.where(first > 0, running[np.maximum(first, 1) - 1], 0)
        places = np.repeat(before + 1 - first, counts) + np.arange(len(sums))
        self.tags[places] = running + np.repeat(base, counts)

    def at(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the tags of tokens, uint64[n]."""
        return self.tags[self.offsets[rows] + positions + 1]

    def _reserve(self, index: int, num_tags: int) -> None:
        """Move a request to a free place with room for at least `num_tags` tags."""
        room = max(64, 2 * num_tags)
        if self._used + room > len(self.tags):
            self._compact(room)
        old, kept = self.offsets[index], min(self.capacities[index], self.lengths[index] + 1)
        self.tags[self._used : self._used + kept] = self.tags[old : old + kept]
        self.offsets[index], self.capacities[index] = self._used, room
        self._used += room

    def _compact(self, room: int) -> None:
        live = np.flatnonzero(self.capacities[: self._num_rows])
        tags = np.zeros(2 * (int(self.capacities[live].sum()) + room), np.uint64)
        self._used = 0
        for index in live.tolist():
            old, size = self.offsets[index], self.capacities[index]
            tags[self._used : self._used + size] = self.tags[old : old + size]
            self.offsets[index] = self._used
            self._used += int(size)
        self.tags = tags


def grown(array: np.ndarray, shape: tuple[int, ...], fill: int = 0) -> np.ndarray:
    """Return an array with at least this shape and the same leading content."""
    if all(have >= need for have, need in zip(array.shape, shape)):
        return array
    sizes = [
        have if have >= need else max(need, 2 * have) for have, need in zip(array.shape, shape)
    ]
    larger = np.full(sizes, fill, array.dtype)
    larger[tuple(slice(size) for size in array.shape)] = array
    return larger
