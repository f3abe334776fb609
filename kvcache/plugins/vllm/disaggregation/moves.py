# SPDX-License-Identifier: Apache-2.0
"""Computes which bytes of which remote rank fill a local rank's blocks of one group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvcache.sources.disaggregation.layout import VEC, GroupLayout, check_like
from kvcache.transfer.description import CacheDescription
from kvcache.transfer.plan.fragments import GroupFragments
from kvcache.transfer.plan.patterns import sources_of_heads
from kvcache.transfer.plan.transfer_plan import plan_transfer

_MOST_ROWS = 1 << 19  # rows per piece, to bound memory
_NO_BORDERS = np.empty(0, np.int64)


class Moves(NamedTuple):
    """Bytes to read from one remote rank: int64[n] local addresses, remote addresses and lengths."""

    remote_rank: int
    local: np.ndarray
    remote: np.ndarray
    length: np.ndarray


class GroupPlan:
    """The reads of one group for arbitrary blocks, planned by `plan_transfer` from both descriptions.

    Raises ValueError under the same conditions as `check_like`.
    """

    def __init__(self, local: GroupLayout, remote: GroupLayout, local_rank: int) -> None:
        check_like([local], [remote])
        self.local, self.remote = local, remote
        mine, theirs = local.description, remote.description
        if local.interior == VEC and mine.block_size != theirs.block_size:
            self._plan, self._rows = _plan_apart(mine, theirs, local_rank)
        else:
            self._plan = plan_transfer(mine, theirs, local_rank, allow_permutation=False)
            self._rows = self._plan.fragments
        self.remote_ranks = tuple(np.unique(self._rows.remote_rank).tolist())

    def moves(
        self,
        local_addresses: Sequence[int],
        remote_addresses: Mapping[int, Sequence[int]],
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        local_borders: np.ndarray = _NO_BORDERS,
        remote_borders: Mapping[int, np.ndarray] | None = None,
    ) -> Iterator[Moves]:
        """Yield the reads that fill the local blocks, in pieces.

        Adjacent reads are merged, except across borders. On each side, block i of a request holds
        the tokens starting at i times the block size. Blocks with id 0 on either side, and blocks
        that the other side does not have, are skipped.

        Args:
            local_addresses: Start of page 0, by layer.
            remote_addresses: Start of page 0, by rank and layer.
            local_blocks: Block ids of the request on this side.
            remote_blocks: Block ids of the request on the other side.
            local_borders: int64[m] start addresses of allocations.
            remote_borders: int64[m] start addresses of allocations, by rank.
        """
        local_pages = _pages(local_blocks, self.local.pages_per_block)
        remote_pages = _pages(remote_blocks, self.remote.pages_per_block)
        mine, theirs = self._plan.local_pages_per_group, self._plan.remote_pages_per_group
        num_groups = min(-(-len(local_pages) // mine), -(-len(remote_pages) // theirs))
        local_pages = _in_groups(local_pages, num_groups, mine)
        remote_pages = _in_groups(remote_pages, num_groups, theirs)
        local_stride, remote_stride = self.local.description, self.remote.description
        for rank in self.remote_ranks:
            rows = GroupFragments(*(each[self._rows.remote_rank == rank] for each in self._rows))
            local_base = np.array(local_addresses, np.int64)[rows.local_region] + rows.local_offset
            remote_base = np.array(remote_addresses[rank], np.int64)[rows.remote_region]
            remote_base = remote_base + rows.remote_offset
            step = max(_MOST_ROWS // len(rows.length), 1)
            for begin in range(0, num_groups, step):
                own = local_pages[begin : begin + step, rows.local_page]
                other = remote_pages[begin : begin + step, rows.remote_page]
                is_there = (own > 0) & (other > 0)
                if is_there.any():
                    yield _merged(
                        rank,
                        (local_borders, (remote_borders or {}).get(rank, _NO_BORDERS)),
                        (local_base + own * local_stride.page_stride)[is_there],
                        (remote_base + other * remote_stride.page_stride)[is_there],
                        np.broadcast_to(rows.length, own.shape)[is_there],
                    )


def _plan_apart(mine: CacheDescription, theirs: CacheDescription, local_rank: int):
    """Return (plan, rows) of a group with K as [head size, tokens] and V as [tokens, head size].

    Each head of a layer is planned separately: K as heads of one element, V as one head.
    """
    half, size = mine.head_size // 2, mine.head_bytes[0] // mine.head_size
    parts = []
    for heads, head_size in ((half, 1), (1, half)):
        shape = {"num_layers": 1, "total_num_kv_heads": heads, "head_size": head_size}
        both = [
            CacheDescription(
                engine_id=each.engine_id,
                v_head_size=0,
                block_size=each.block_size,
                memory_order=each.memory_order,
                dtype=each.dtype,
                page_stride=each.page_stride,
                **shape,
            )
            for each in (mine, theirs)
        ]
        parts.append(plan_transfer(*both, 0, allow_permutation=False))
    sources = np.array(sources_of_heads(mine, theirs, mine.coordinates(local_rank), 0))
    first = [theirs.heads(rank).start for rank in sources.tolist()]
    remote_head = np.array(mine.heads(local_rank)) - np.array(first)
    local_head, layers = np.arange(len(sources)), np.arange(mine.num_layers)
    found = []
    for part, plan in enumerate(parts):
        rows = plan.fragments
        shape = len(layers), len(sources), len(rows.length)
        at = [
            heads[:, None] * (2 * half * each.block_size * size)
            + part * half * each.block_size * size
            for heads, each in ((remote_head, theirs), (local_head, mine))
        ]
        columns = (
            sources[:, None],
            rows.remote_page,
            layers[:, None, None],
            rows.remote_offset + at[0],
            rows.local_page,
            layers[:, None, None],
            rows.local_offset + at[1],
            rows.length,
        )
        found.append([np.broadcast_to(each, shape).ravel() for each in columns])
    return parts[0], GroupFragments(*(np.concatenate(each) for each in zip(*found)))


def _pages(blocks: Sequence[int], pages_per_block: int) -> np.ndarray:
    """Return the pages of blocks as int64[n]. Block 0 marks a missing block and gives page 0."""
    ids = np.array(blocks, np.int64)[:, None]
    return np.where(ids > 0, ids * pages_per_block + np.arange(pages_per_block), 0).ravel()


def _in_groups(pages: np.ndarray, num_groups: int, per_group: int) -> np.ndarray:
    """Return int64[groups, pages per group], padded with 0."""
    padded = np.zeros(num_groups * per_group, np.int64)
    taken = pages[: len(padded)]
    padded[: len(taken)] = taken
    return padded.reshape(num_groups, per_group)


def _merged(
    rank: int,
    borders: tuple[np.ndarray, np.ndarray],
    local: np.ndarray,
    remote: np.ndarray,
    length: np.ndarray,
) -> Moves:
    """Sort by local address, and merge reads that are adjacent on both sides, except across borders."""
    order = np.argsort(local, kind="stable")
    local, remote, length = local[order], remote[order], length[order]
    begins = np.ones(len(local), bool)
    begins[1:] = (np.diff(local) != length[:-1]) | (np.diff(remote) != length[:-1])
    begins |= np.isin(local, borders[0]) | np.isin(remote, borders[1])
    first = np.flatnonzero(begins)
    return Moves(rank, local[first], remote[first], np.add.reduceat(length, first))
