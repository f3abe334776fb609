# SPDX-License-Identifier: Apache-2.0
"""A transfer plan's fragments in factored form, and their application to page numbers.

All layers, both K and V, and most pages are transferred in the same way. Therefore, a plan consists
of only a few patterns. Each pattern is the product of *descriptors* (positions in a page's regions)
and *runs* (pages). For example, ten thousand blocks of 80 layers have millions of fragments, but
only tens of thousands of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvcache.checks import MAX_INT32, integer_array, shown


class GroupFragments(NamedTuple):
    """The fragments that fill one group of pages, one fragment per row. Each column is int64[n].
    Offsets and lengths are in bytes.

    Page numbers count from 0 within the group's pages on a rank. Offsets are relative to the start
    of the page in its region.
    """

    remote_rank: np.ndarray
    remote_page: np.ndarray
    remote_region: np.ndarray
    remote_offset: np.ndarray
    local_page: np.ndarray
    local_region: np.ndarray
    local_offset: np.ndarray
    length: np.ndarray


class Fragments(NamedTuple):
    """The fragments of given pages, int64[n] per column, in bytes from the start of a region."""

    remote_rank: np.ndarray
    remote_region: np.ndarray
    remote_offset: np.ndarray
    local_region: np.ndarray
    local_offset: np.ndarray
    length: np.ndarray


@dataclass(frozen=True, eq=False)
class Pattern:
    """A group's fragments from one remote rank, as the product of `descriptors` and `runs`.

    A fragment's byte position is the sum of its descriptor's and its run's byte offsets. There is
    one descriptor for each combination of an entry of `layers` and an entry of `offsets`.

    Attributes:
        layers: int64[n, 4], (remote region, byte in it, local region, byte in it). Each row is the
            K or V of a layer, or several of them merged.
        offsets: int64[k, 2], (remote, local) byte offsets to add to those in `layers`.
        runs: int64[m, 5], (remote page, byte in it, local page, byte in it, length).
        remote_stride: Distance in bytes between remote pages, equal in all regions of the pattern.
        local_stride: Distance in bytes between local pages, equal in all regions of the pattern.
        joins: Whether the runs of consecutive pages can be contiguous and thus merged.
    """

    remote_rank: int
    layers: np.ndarray
    offsets: np.ndarray
    runs: np.ndarray
    remote_stride: int
    local_stride: int
    joins: bool

    @cached_property
    def descriptors(self) -> np.ndarray:
        """int64[d, 4], with the same columns as `layers`, ordered by layer and then by offset."""
        descriptors = np.repeat(self.layers, len(self.offsets), axis=0)
        descriptors[:, 1::2] += np.tile(self.offsets, (len(self.layers), 1))
        return descriptors

    @property
    def num_fragments(self) -> int:
        """Number of fragments per group."""
        return len(self.layers) * len(self.offsets) * len(self.runs)

    def apply(
        self, local_ids: np.ndarray, remote_ids: np.ndarray, kept: np.ndarray | None = None
    ) -> Runs:
        """Return the byte runs between remote and local pages, with contiguous runs merged.

        `remote_ids`, `local_ids`: int64[groups, pages]. `kept`: bool[groups, m], the runs to keep.
        None: all.
        """
        remote_page, remote_at, local_page, local_at, length = self.runs.T
        remote = _addresses(remote_ids, remote_page, self.remote_stride, remote_at)
        local = _addresses(local_ids, local_page, self.local_stride, local_at)
        size = int(length[0])
        lengths = np.tile(length, len(local_ids))
        if kept is not None:
            chosen = np.flatnonzero(kept.ravel())
            remote, local, lengths = remote[chosen], local[chosen], lengths[chosen]
        meets = np.empty(0, np.int64)
        if self.joins:  # all runs then have the same length
            meets = np.flatnonzero(remote[1:] - remote[:-1] == size)
            meets = meets[local[meets + 1] - local[meets] == size]
        if len(meets) == 0:
            return Runs(self.remote_rank, self.descriptors, remote, local, lengths)
        begins = np.ones(len(local), bool)
        begins[meets + 1] = False
        first = np.flatnonzero(begins)
        lengths = np.diff(first, append=len(local)) * size
        return Runs(self.remote_rank, self.descriptors, remote[first], local[first], lengths)


@dataclass(frozen=True, eq=False)
class Runs:
    """The fragments of given pages from one remote rank, as the product of `descriptors` and runs.

    The fragment of run m and descriptor d is copied from byte
    `remote_offset[m] + descriptors[d, 1]` of remote region `descriptors[d, 0]` to byte
    `local_offset[m] + descriptors[d, 3]` of local region `descriptors[d, 2]`.

    Attributes:
        descriptors: int64[d, 4], (remote region, byte in it, local region, byte in it).
        remote_offset: int64[m], bytes.
        local_offset: int64[m], bytes.
        length: int64[m], bytes.
    """

    remote_rank: int
    descriptors: np.ndarray
    remote_offset: np.ndarray
    local_offset: np.ndarray
    length: np.ndarray

    @property
    def num_fragments(self) -> int:
        """Number of fragments."""
        return len(self.descriptors) * len(self.length)

    @property
    def num_bytes(self) -> int:
        """Total size of all fragments in bytes."""
        return len(self.descriptors) * int(self.length.sum())

    def expand(self) -> Fragments:
        """Return one row per fragment, ordered by descriptor and then by run."""
        num_descriptors, num_runs = len(self.descriptors), len(self.length)
        remote_region, remote_at, local_region, local_at = self.descriptors.T
        return Fragments(
            np.full(num_descriptors * num_runs, self.remote_rank),
            np.repeat(remote_region, num_runs),
            np.add.outer(remote_at, self.remote_offset).ravel(),
            np.repeat(local_region, num_runs),
            np.add.outer(local_at, self.local_offset).ravel(),
            np.tile(self.length, num_descriptors),
        )


@dataclass(frozen=True, eq=False)
class TransferRuns:
    """The byte runs of a transfer, with consecutive pages merged. Returned by `TransferPlan.apply`."""

    by_rank: tuple[Runs, ...]  # runs per remote rank; a rank may occur several times

    @property
    def num_fragments(self) -> int:
        """Number of fragments over all remote ranks."""
        return sum(runs.num_fragments for runs in self.by_rank)

    @property
    def num_bytes(self) -> int:
        """Number of bytes over all remote ranks."""
        return sum(runs.num_bytes for runs in self.by_rank)

    def expand(self) -> Fragments:
        """Return one row per fragment. There are many, so use this only for a few pages."""
        return joined(Fragments, [runs.expand() for runs in self.by_rank])


def expand_pattern(pattern: Pattern) -> GroupFragments:
    """Return one row per fragment in a group, ordered by descriptor and then by run."""
    remote_page, remote_at, local_page, local_at, length = pattern.runs.T
    runs = Runs(pattern.remote_rank, pattern.descriptors, remote_at, local_at, length)
    pages = (np.tile(page, len(pattern.descriptors)) for page in (remote_page, local_page))
    return GroupFragments(
        **runs.expand()._asdict(), **dict(zip(("remote_page", "local_page"), pages))
    )


def _addresses(ids: np.ndarray, page: np.ndarray, stride: int, at: np.ndarray) -> np.ndarray:
    """Return the byte offset in a region of each run's start, by group: int64[groups * runs]."""
    if ids.shape[1] == 1:
        found = ids * stride + at  # all runs use one page
    elif len(page) == ids.shape[1] and (page == np.arange(len(page))).all():
        found = ids * stride
        found += at
    else:
        found = np.take(ids, page, axis=1)
        found *= stride
        found += at
    return found.ravel()


def joined(kind: Callable, tables: list[tuple]) -> tuple:
    """Concatenate the tables column by column into one table of type `kind`."""
    if not tables:
        return kind(*[np.empty(0, np.int64)] * len(kind._fields))
    return kind(*(np.concatenate(columns) for columns in zip(*tables)))


def page_ids(ids: np.ndarray, used: np.ndarray, name: str) -> np.ndarray:
    """Return page IDs as int64[groups, len(used)]. Raises TypeError or ValueError."""
    given = integer_array(ids, name)
    width = len(used)
    if given.ndim != 2 or given.shape[1] != width:
        raise ValueError(f"{name} has shape {list(given.shape)}: expected [groups, {width}]")
    wanted = given if used.all() else given[:, used]
    if wanted.size and (wanted.min() < 1 or wanted.max() > MAX_INT32):
        invalid = wanted[(wanted < 1) | (wanted > MAX_INT32)][0]
        raise ValueError(f"{name} holds {invalid}: expected page numbers, 1 to {MAX_INT32}")
    return given.astype(np.int64)


def check_each_once(ids: np.ndarray, name: str) -> None:
    """Raise ValueError if a page occurs twice. All page numbers must be non-negative."""
    if ids.size == 0:
        return
    most = int(ids.max())
    if most < 64 * ids.size:  # marking pages is cheaper than sorting them
        named = np.zeros(most + 1, bool)
        named[ids] = True
        if np.count_nonzero(named) == ids.size:
            return
    pages, counts = np.unique(ids, return_counts=True)
    if counts.max() > 1:
        raise ValueError(f"{name} has page {pages[counts.argmax()]} twice: expected each page once")


def check_ranks(ids: Mapping[int, np.ndarray], ranks: Iterable[int], name: str) -> None:
    """Raise ValueError unless `ids` has an entry for each of the ranks."""
    if missing := sorted(set(ranks) - set(ids)):
        raise ValueError(f"{name} is missing ranks {missing} (ranks present: {shown(list(ids))})")


def remote_page_ids(
    ids: Mapping[int, np.ndarray] | np.ndarray, used: dict[int, np.ndarray], num_groups: int
) -> dict[int, np.ndarray]:
    """Return page numbers for each remote rank, int64[groups, pages].

    `ids`: a mapping from rank to array, or one array for all ranks. `used`: bool[pages] by rank.
    """
    if not isinstance(ids, Mapping):
        if not used:  # no rank is read from
            return {}
        any_used = np.logical_or.reduce(list(used.values()))
        found = dict.fromkeys(used, page_ids(ids, any_used, "remote_pages"))
    else:
        check_ranks(ids, used, "remote_pages")
        found = {r: page_ids(ids[r], used[r], f"remote_pages[{r}]") for r in used}
    for rank, pages in found.items():
        if len(pages) != num_groups:
            raise ValueError(
                f"remote_pages of rank {rank} has {len(pages)} groups, but local_pages has "
                f"{num_groups}: expected equal numbers of groups"
            )
    return found
