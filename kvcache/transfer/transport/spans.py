# SPDX-License-Identifier: Apache-2.0
"""The factored fragments on one side of a transfer, which can be split to fit pieces of staging
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvcache.checks import MAX_INT32, MAX_INT64, instance, integer, integers

_NUM_HEADER = 2  # number of int64 values in the header: the numbers of bases and of runs
_MOST = 2**62


@dataclass(frozen=True, eq=False)
class Spans:
    """Memory fragments, as the product of `bases` and runs.

    Fragment (d, m) consists of `length[m]` bytes starting at address `bases[d] + offsets[m]`.

    Args:
        bases: int64[d]. Addresses.
        offsets: int64[m]. Offset of each run in bytes.
        length: int64[m]. Length of each run in bytes.

    Example:
        >>> spans = Spans(np.array([1000, 9000]), np.array([0, 64]), np.array([16, 32]))
        >>> spans.num_fragments, spans.num_bytes, spans.addresses().tolist()
        (4, 96, [1000, 1064, 9000, 9064])
    """

    bases: np.ndarray
    offsets: np.ndarray
    length: np.ndarray

    @classmethod
    def of(cls, addresses: np.ndarray, length: np.ndarray, name: str) -> Spans:
        """Create one fragment per address, from int64[n].

        Raises TypeError or ValueError for other values.
        """
        instance(name, str, "name")
        offsets, length = integers(addresses, name, ()), integers(length, "length", ())
        _check_as_many(offsets, length, name)
        return cls(np.zeros(1, np.int64), offsets, length).checked(name)

    def beside(self, addresses: np.ndarray, name: str) -> Spans:
        """Create fragments with the lengths of these, made by `of`, at other addresses."""
        instance(name, str, "name")
        offsets = integers(addresses, name, ())
        _check_as_many(offsets, self.length, name)
        _check_addresses(offsets, name, "offsets")
        return Spans(self.bases, offsets, self.length)

    def checked(self, name: str) -> Spans:
        """Validate the spans and return them.

        Raises ValueError for a length below 1, or sums that overflow int64.
        """
        for what in ("bases", "offsets", "length"):
            array = getattr(self, what)
            instance(array, np.ndarray, f"{what} of {name}")
            if array.dtype != np.int64 or array.ndim != 1:
                raise ValueError(
                    f"{what} of {name} is {array.dtype}{list(array.shape)}: expected int64[n]"
                )
        if max(len(self.bases), len(self.length)) > MAX_INT32:
            raise ValueError(f"{name} has more than {MAX_INT32} bases or runs: expected fewer")
        _check_as_many(self.offsets, self.length, f"offsets of {name}")
        if len(self.length) and (least := int(self.length.min())) < 1:
            raise ValueError(f"length of {name} holds {least}: expected 1 or more")
        _check_addresses(self.bases, name, "bases")
        _check_addresses(self.offsets, name, "offsets")
        total = float(self.length.sum(dtype=np.float64)) * len(self.bases)
        if total > _MOST:
            raise ValueError(f"{name} has {total:g} bytes: expected fewer than 2^62")
        return self

    @property
    def num_fragments(self) -> int:
        """Number of fragments."""
        return len(self.bases) * len(self.length)

    @property
    def num_bytes(self) -> int:
        """Total size of all fragments in bytes."""
        return len(self.bases) * int(self.length.sum())

    def addresses(self) -> np.ndarray:
        """Return each fragment's start address, ordered by base: int64[d * m].

        The result has one entry per fragment, so call this method only on small parts (`tiles`).
        """
        return np.add.outer(self.bases, self.offsets).ravel()

    def tiles(self, piece_bytes: int) -> Iterator[Spans]:
        """Split these spans into spans of at most `piece_bytes` bytes. Longer runs are split.

        The two sides of a transfer have equal run lengths, so both are split in the same way.
        """
        piece_bytes = integer(piece_bytes, "piece_bytes", 1, MAX_INT64)
        if self.num_fragments == 0:
            return
        offsets, length = _cut(self.offsets, self.length, piece_bytes)
        together = max(1, min(len(self.bases), piece_bytes // int(length.max())))
        ends = np.cumsum(length)
        groups, first = [], 0
        while first < len(length):
            most = (int(ends[first - 1]) if first else 0) + piece_bytes // together
            last = int(np.searchsorted(ends, most, "right"))
            groups.append(slice(first, last))
            first = last
        for base in range(0, len(self.bases), together):
            for group in groups:
                yield Spans(self.bases[base : base + together], offsets[group], length[group])

    def to_bytes(self) -> bytes:
        """Serialize the spans for a peer, as little-endian int64."""
        header = np.array([len(self.bases), len(self.length)])
        columns = (header, self.bases, self.offsets, self.length)
        return np.concatenate(columns).astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Spans:
        """Deserialize the result of `to_bytes`. Raises ValueError for invalid data."""
        instance(data, bytes | bytearray | memoryview, "data")
        if len(data) % 8 or len(data) < 8 * _NUM_HEADER:
            raise ValueError(
                f"data has {len(data)} bytes: expected whole int64, {_NUM_HEADER} or more"
            )
        values = np.frombuffer(data, "<i8").astype(np.int64)
        num_bases, num_runs = values[:_NUM_HEADER].tolist()
        if min(num_bases, num_runs) < 0 or _NUM_HEADER + num_bases + 2 * num_runs != len(values):
            raise ValueError(
                f"spans announce {num_bases} bases and {num_runs} runs, but have {len(values)} numbers"
            )
        columns = np.split(values[_NUM_HEADER:], [num_bases, num_bases + num_runs])
        return cls(*columns).checked("spans")


def _check_as_many(offsets: np.ndarray, length: np.ndarray, name: str) -> None:
    if len(offsets) != len(length):
        raise ValueError(
            f"{name} has {len(offsets)} entries, but length has {len(length)}: expected equal numbers"
        )


def _check_addresses(values: np.ndarray, name: str, what: str) -> None:
    if len(values) and max(-int(values.min()), int(values.max())) > _MOST:
        raise ValueError(f"{what} of {name} holds a number above 2^62: expected an address")


def _cut(offsets: np.ndarray, length: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Split runs that are longer than `most` bytes, and return the resulting runs."""
    parts = -(-length // most)
    if int(parts.max()) == 1:
        return offsets, length
    before = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    cut = np.repeat(length, parts) - before * most
    return np.repeat(offsets, parts) + before * most, np.minimum(cut, most)


def check_match(local: Spans, remote: Spans) -> None:
    """Raise ValueError unless both sides have the same number of bases and equal run lengths."""
    for side, name in ((local, "local"), (remote, "remote")):
        instance(side, Spans, name)
        side.checked(name)
    if len(local.bases) != len(remote.bases) or not np.array_equal(local.length, remote.length):
        raise ValueError(
            f"local has {len(local.bases)} bases and {len(local.length)} runs, but "
            f"remote has {len(remote.bases)} and {len(remote.length)}: expected runs of the same lengths"
        )


_NO_BORDERS = (np.empty(0, np.int64), np.empty(0, np.int64))


def joined(
    local: Spans, remote: Spans, borders: tuple[np.ndarray, np.ndarray] = _NO_BORDERS
) -> tuple[Spans, Spans]:
    """Merge runs that are contiguous on both sides. Each side has the single base 0.

    `borders`: local and remote addresses at which a run is not merged with the previous run.
    """
    length = local.length
    if len(length) < 2:
        return local, remote
    follows = local.offsets[1:] == local.offsets[:-1] + length[:-1]
    if not follows.any():
        return local, remote
    follows &= remote.offsets[1:] == remote.offsets[:-1] + length[:-1]
    begins = np.concatenate([[True], ~follows])
    for side, addresses in zip((local, remote), borders):
        if len(addresses):
            begins |= np.isin(side.offsets, addresses)
    first = np.flatnonzero(begins)
    lengths = np.add.reduceat(length, first)
    return tuple(Spans(side.bases, side.offsets[first], lengths) for side in (local, remote))
