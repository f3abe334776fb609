# SPDX-License-Identifier: Apache-2.0
"""Computes which bytes to read from each remote rank to fill a local rank's blocks of one group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvcache.transfer import plan_transfer
from kvcache.transfer.plan.fragments import GroupFragments
from kvcache.transfer.sharding import sources_of_heads
from kvcache_exchange.disaggregation.layout import BY_TOKEN, VEC, GroupLayout, check_like

CONVERTS = BY_TOKEN, VEC  # the values of `interior` that `GroupPlan` can convert into each other
_MOST_ROWS = 1 << 19  # maximum number of reads to compute at a time, to bound memory use
_NO_BORDERS = np.empty(0, np.int64)


class Moves(NamedTuple):
    """Bytes to read from one remote rank: int64[n] local addresses, remote addresses and lengths."""

    remote_rank: int
    local: np.ndarray
    remote: np.ndarray
    length: np.ndarray


class GroupPlan:
    """Plans the reads of one group for arbitrary blocks, based on `plan_transfer` and both
    descriptions.

    Raises ValueError under the same conditions as `check_like`.
    """

    def __init__(self, local: GroupLayout, remote: GroupLayout, local_rank: int) -> None:
        check_like([local], [remote], CONVERTS)
        self.local, self.remote = local, remote
        mine, theirs = local.description, remote.description
        is_alike = local.interior == remote.interior and mine.block_size == theirs.block_size
        if VEC in (local.interior, remote.interior) and not is_alike:
            self._plan = _plan_apart(local, remote, local_rank)
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

        Adjacent reads are merged, except across allocation borders. On each side, block i of a
        request holds the tokens starting at position i times that side's block size. Blocks whose
        id is 0 on either side and blocks that exist on only one side are skipped.

        Args:
            local_addresses: Start of page 0, by region.
            remote_addresses: Start of page 0, by rank and region.
            local_blocks: Block ids of the request on this side.
            remote_blocks: Block ids of the request on the other side.
            local_borders: int64[m] start addresses of allocations.
            remote_borders: int64[m] start addresses of allocations, by rank.
        """
        local_pages = _pages(local_blocks, self.local.pages_per_block)
        remote_pages = _pages(remote_blocks, self.remote.pages_per_block)
        per_group = self._plan.local_pages_per_group, self._plan.remote_pages_per_group
        num_groups = min(
            -(-len(local_pages) // per_group[0]), -(-len(remote_pages) // per_group[1])
        )
        local_pages = _in_groups(local_pages, num_groups, per_group[0])
        remote_pages = _in_groups(remote_pages, num_groups, per_group[1])
        mine, theirs = self.local.description, self.remote.description
        for rank in self.remote_ranks:
            rows = GroupFragments(*(each[self._rows.remote_rank == rank] for each in self._rows))
            local_stride = mine.region_strides[rows.local_region]
            remote_stride = theirs.region_strides[rows.remote_region]
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
                        (local_base + own * local_stride)[is_there],
                        (remote_base + other * remote_stride)[is_there],
                        np.broadcast_to(rows.length, own.shape)[is_there],
                    )


class _Rows(NamedTuple):
    """A read plan for a number of tokens that fills whole pages on both sides."""

    local_pages_per_group: int
    remote_pages_per_group: int
    fragments: GroupFragments


def _plan_apart(local: GroupLayout, remote: GroupLayout, local_rank: int) -> _Rows:
    """Plan the reads of K and V separately, because at least one side uses `VEC`.

    `VEC` stores a head's K as [head size, tokens], followed by its V as [tokens, head size].
    """
    mine, theirs = local.description, remote.description
    sizes = mine.block_size, theirs.block_size
    num_tokens = math.lcm(*sizes)
    stages, own = (mine.pipeline_stages, theirs.pipeline_stages), mine.coordinates(local_rank)
    heads, cp_world_size = mine.total_num_kv_heads, mine.cp_world_size
    sources = np.array(sources_of_heads(*stages, 0, heads, own, cp_world_size))
    first = np.array([theirs.heads(rank).start for rank in sources.tolist()])
    heads = np.arange(len(sources)), np.array(mine.heads(local_rank)) - first
    is_vec = local.interior == VEC, remote.interior == VEC
    found = []
    for kv, size in enumerate((mine.head_size, mine.v_head_size)):
        element_bytes = int(mine.head_bytes[kv]) // size
        # Tokens and elements per read: K in `VEC` is contiguous along tokens, all other parts along
        # elements.
        tokens, elements = (math.gcd(*sizes) if all(is_vec) else 1), size
        if kv == 0 and any(is_vec):
            elements = 1
        at = np.meshgrid(
            *(np.arange(mine.num_layers), np.arange(len(sources))),
            *(np.arange(0, num_tokens, tokens), np.arange(0, size, elements)),
            indexing="ij",
        )
        layer, number, token, element = (each.ravel() for each in at)
        places = [
            _places(layout, kv, layer, head[number], token, element)
            for layout, head in zip((local, remote), heads)
        ]
        length = np.full(len(layer), tokens * elements * element_bytes)
        local_page, local_region, local_offset = places[0]
        remote_page, remote_region, remote_offset = places[1]
        found.append(
            [
                *(sources[number], remote_page, remote_region, remote_offset),
                *(local_page, local_region, local_offset, length),
            ]
        )
    columns = GroupFragments(*(np.concatenate(each) for each in zip(*found)))
    return _Rows(num_tokens // sizes[0], num_tokens // sizes[1], columns)


def _places(
    layout: GroupLayout,
    kv: int,
    layer: np.ndarray,
    head: np.ndarray,
    token: np.ndarray,
    element: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the page, region and offset of each element, as three int64[n] arrays."""
    description = layout.description
    placed, block_size = description.placement, description.block_size
    page, token = np.divmod(token, block_size)
    sizes = description.head_size, description.v_head_size
    element_bytes = int(description.head_bytes[kv]) // sizes[kv]
    if layout.interior != VEC:
        region, offset = description.offset_of(layer, kv, token, head)
        return page, region, offset + element * element_bytes
    first = (head * sum(sizes) + (sizes[0] if kv else 0)) * block_size
    within = token * sizes[1] + element if kv else element * block_size + token
    return page, placed.regions[layer, 0], (first + within) * element_bytes


def _pages(blocks: Sequence[int], pages_per_block: int) -> np.ndarray:
    """Return the pages of blocks as int64[n]. Block 0 marks a missing block and maps to page 0."""
    ids = np.array(blocks, np.int64)[:, None]
    return np.where(ids > 0, ids * pages_per_block + np.arange(pages_per_block), 0).ravel()


def _in_groups(pages: np.ndarray, num_groups: int, per_group: int) -> np.ndarray:
    """Return the pages as int64[groups, pages per group], padded with 0."""
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
