"""The mathematics of a transfer plan: which rows of a group's pages meet, and what is one piece of it.

A row is one head of one token in K or V of one layer: no layout tears it. In rows all layers, K and V are
alike, so rows are matched and merged once, and only then counted in bytes and repeated over layers.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

import numpy as np

from kvcache.transfer.description import CacheDescription, Coordinates
from kvcache.transfer.plan.fragments import Pattern
from kvcache.transfer.sharding import heads_of_rank, ranks_of_head, replica_for


class RowRuns(NamedTuple):
    """Runs of rows that lie side by side on both sides, int64[n] each; rows count within a page."""

    source: np.ndarray  # cp_rank * tp_size + tp_rank of the remote rank
    remote_page: np.ndarray
    remote_row: np.ndarray
    local_page: np.ndarray
    local_row: np.ndarray
    length: np.ndarray


class Shape(NamedTuple):
    """Page pairs between which the same rows move: each of `pieces` from each of `starts` on."""

    pieces: np.ndarray  # int64[k, 2]: rows on from the start, (remote, local)
    starts: np.ndarray  # int64[m, 4]: remote page, row in it, local page, row in it
    length: int  # rows of a piece


def find_patterns(
    local: CacheDescription, remote: CacheDescription, local_rank: int, *, received: bool
) -> tuple[Pattern, ...]:
    """How a group's pages of one local rank are filled.

    `received`: in the remote's order of rows, for a permutation to follow; else each to its place.
    """
    at = local.coordinates(local_rank)
    rows = _matching_rows(local, remote, at, received)
    by_pipeline_rank = _members(local, remote, at.pp_rank)
    first_of_source = np.flatnonzero(np.diff(rows.source, prepend=-1))
    patterns = []
    for first, last in zip(first_of_source, [*first_of_source[1:], len(rows.source)]):
        cp_rank, tp_rank = divmod(int(rows.source[first]), remote.tp_size)
        for shape in _shapes(RowRuns(*(column[first:last] for column in rows))):
            for pp_rank, members in by_pipeline_rank.items():
                source = remote.rank_of(Coordinates(cp_rank, pp_rank, tp_rank))
                patterns += _in_bytes(local, remote, source, shape, members)
    return tuple(patterns)


def _matching_rows(
    local: CacheDescription, remote: CacheDescription, at: Coordinates, received: bool
) -> RowRuns:
    tokens_per_group = lcm(local.tokens_per_page, remote.tokens_per_page)
    token = np.arange(tokens_per_group // local.cp_world_size)  # of this rank's, in their order
    chunk, in_chunk = np.divmod(token, local.cp_interleave)
    position = (chunk * local.cp_world_size + at.cp_rank) * local.cp_interleave + in_chunk
    chunk, in_chunk = np.divmod(position, remote.cp_interleave)
    chunk, cp_rank = np.divmod(chunk, remote.cp_world_size)
    remote_token = chunk * remote.cp_interleave + in_chunk
    remote_page, remote_token = np.divmod(remote_token, remote.block_size)

    heads = heads_of_rank(local.total_num_kv_heads, local.tp_size, at.tp_rank)
    tp_rank = np.array([_source_of_head(local, remote, at, head) for head in heads])
    first_head = tp_rank * remote.total_num_kv_heads // remote.tp_size
    remote_head = np.array(heads) - first_head

    head, rows_per_page = np.arange(len(heads)), local.block_size * len(heads)
    if received:
        block, in_block = np.divmod(token[:, None], remote.block_size)
        if remote.layout == "NHD":
            row = token[:, None] * len(heads) + head
        else:
            row = (block * len(heads) + head) * remote.block_size + in_block
        local_page, local_row = np.divmod(row, rows_per_page)
    else:
        local_page, in_page = np.divmod(token[:, None], local.block_size)
        local_row = local.row(in_page, head)
    columns = RowRuns(
        cp_rank[:, None] * remote.tp_size + tp_rank,
        remote_page[:, None],
        remote.row(remote_token[:, None], remote_head),
        local_page,
        local_row,
        np.int64(1),
    )
    return _merged(columns, rows_per_page)


def _source_of_head(
    local: CacheDescription, remote: CacheDescription, at: Coordinates, head: int
) -> int:
    """The one remote tensor-parallel rank that a head is read from.

    Its readers are the local ranks that hold it, and whose layers lie in the same remote stage: as
    `KVTopology` counts them, times the context-parallel ranks.
    """
    holders = ranks_of_head(local.total_num_kv_heads, local.tp_size, head)
    stages = max(1, local.pp_size // remote.pp_size)
    reader = holders.index(at.tp_rank) * local.cp_world_size + at.cp_rank
    reader = reader * stages + at.pp_rank % stages
    num_readers = len(holders) * local.cp_world_size * stages
    return replica_for(head, remote.total_num_kv_heads, remote.tp_size, reader, num_readers)


def _merged(rows: RowRuns, rows_per_page: int) -> RowRuns:
    """By source, then in the order in which they lie here, neighbours on both sides made one."""
    shape = np.broadcast_shapes(*(column.shape for column in rows))
    rows = RowRuns(*(np.broadcast_to(column, shape).ravel() for column in rows))
    num_rows = len(rows.source)
    order = np.argsort(
        rows.source * num_rows + rows.local_page * rows_per_page + rows.local_row, kind="stable"
    )
    rows = RowRuns(*(column[order] for column in rows))
    apart = np.ones(num_rows, bool)
    apart[1:] = (
        (np.diff(rows.source) != 0)
        | (np.diff(rows.remote_page) != 0)
        | (np.diff(rows.local_page) != 0)
        | (np.diff(rows.remote_row) != 1)
        | (np.diff(rows.local_row) != 1)
    )
    first = np.flatnonzero(apart)
    merged = RowRuns(*(column[first] for column in rows))
    return merged._replace(length=np.diff(first, append=num_rows))


def _shapes(rows: RowRuns) -> list[Shape]:
    """The rows of one source, page pairs of the same form put together."""
    pair = rows.local_page * (int(rows.remote_page.max()) + 1) + rows.remote_page
    order = np.lexsort((pair, rows.length))  # stable: within a pair as they lie here
    pair, length = pair[order], rows.length[order]
    table = np.stack(rows[1:5], axis=1)[order]
    first = np.flatnonzero((np.diff(pair, prepend=-1) != 0) | (np.diff(length, prepend=-1) != 0))
    found: dict[tuple[int, bytes], tuple[np.ndarray, list[np.ndarray]]] = {}
    for begin, end in zip(first, [*first[1:], len(pair)]):
        start = table[begin]
        pieces = np.ascontiguousarray((table[begin:end] - start)[:, [1, 3]])
        _, starts = found.setdefault((int(length[begin]), pieces.tobytes()), (pieces, []))
        starts.append(start)
    return [
        Shape(pieces, np.stack(starts), rows_of_piece)
        for (rows_of_piece, _), (pieces, starts) in found.items()
    ]


def _members(
    local: CacheDescription, remote: CacheDescription, pp_rank: int
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """By remote pipeline rank the layers that it and the local one hold, K and V each.

    int64[n, 4] places, and int64[n] which part it is.
    """
    layer = np.arange(local.layers_per_rank) + pp_rank * local.layers_per_rank
    owner, in_owner = np.divmod(layer, remote.layers_per_rank)
    columns = [
        array[rows]
        for cache, rows in ((remote, in_owner), (local, layer % local.layers_per_rank))
        for array in cache.parts
    ]
    table = np.stack(columns, axis=2)  # [layers, parts, 4]
    num_parts = len(local.row_bytes)
    found = {}
    for rank in range(int(owner[0]), int(owner[-1]) + 1):
        chosen = table[owner == rank].reshape(-1, 4)
        found[rank] = chosen, np.tile(np.arange(num_parts), len(chosen) // num_parts)
    return found


def _in_bytes(
    local: CacheDescription,
    remote: CacheDescription,
    source: int,
    shape: Shape,
    members: tuple[np.ndarray, np.ndarray],
) -> list[Pattern]:
    """Rows counted in bytes and repeated over layers, K and V; whole parts that meet made one."""
    places, parts = members
    scales = local.row_bytes[parts]
    whole = local.block_size * local.heads_per_rank
    if shape.length == whole == remote.block_size * remote.heads_per_rank:
        places, sizes = _merged_members(places, whole * scales)
        scales = sizes // whole  # a place of several parts is a wide row
    kinds = np.stack(
        [scales, remote.region_strides[places[:, 0]], local.region_strides[places[:, 2]]], axis=1
    )
    patterns = []
    for kind in sorted({tuple(row) for row in kinds.tolist()}):
        scale, remote_step, local_step = kind
        chosen = places[(kinds == kind).all(axis=1)]
        runs = np.empty((len(shape.starts), 5), np.int64)
        runs[:, :4] = shape.starts
        runs[:, 1::2] *= scale
        runs[:, 4] = shape.length * scale
        patterns.append(
            Pattern(
                source,
                chosen,
                shape.pieces * scale,
                runs,
                remote_step,
                local_step,
                _may_join(runs, remote_step, local_step),
            )
        )
    return patterns


def _merged_members(members: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parts that begin where the one before ends, on both sides, made one place of their bytes."""
    begins = np.ones(len(members), bool)
    meets = (members[1:, 1::2] == members[:-1, 1::2] + sizes[:-1, None]).all(axis=1)
    begins[1:] = ~meets  # a region's first part begins at 0, and meets none
    first = np.flatnonzero(begins)
    return members[first], np.add.reduceat(sizes, first)


def _may_join(runs: np.ndarray, remote_stride: int, local_stride: int) -> bool:
    """Whether there are page numbers with which a run begins where the one before it ends."""
    ends = runs[:, 1:5:2] + runs[:, 4:]
    begins_next = np.concatenate([runs[1:, 1:5:2], runs[:1, 1:5:2]])  # after the last the first
    return bool(((ends - begins_next) % (remote_stride, local_stride) == 0).all(axis=1).any())
