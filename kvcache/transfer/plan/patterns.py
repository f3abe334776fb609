"""Finds the patterns of a transfer plan: matches and merges the runs of a group's pages on both sides.

One head of one token in K or V of one layer is contiguous in every layout. Offsets are first counted in
units (a head of a token, or less where strides are not multiples of it). In units all layers are equal,
and mostly K and V too. So heads of tokens are matched and merged once, then converted to bytes and
repeated for every layer.
"""

from __future__ import annotations

from math import gcd, lcm
from typing import NamedTuple

import numpy as np

from kvcache.transfer.description import CacheDescription, Coordinates
from kvcache.transfer.plan.fragments import Pattern
from kvcache.transfer.sharding import heads_of_rank, ranks_of_head, replica_for


class UnitRuns(NamedTuple):
    """Runs that are contiguous on both sides, int64[n] each; units count from where K or V begins."""

    source: np.ndarray  # cp_rank * tp_size + tp_rank of the remote rank
    remote_page: np.ndarray
    remote_unit: np.ndarray
    local_page: np.ndarray
    local_unit: np.ndarray
    length: np.ndarray


class UnitPattern(NamedTuple):
    """Runs in units that repeat: each of `offsets` added to each of `first_runs`."""

    offsets: np.ndarray  # int64[k, 2]: units after the first run, (remote, local)
    first_runs: np.ndarray  # int64[m, 4]: remote page, unit in it, local page, unit in it
    length: int  # units of a run


class Strides(NamedTuple):
    """Strides of K, V, or both where they are equal, in units of one head of one token or less."""

    remote_begin: int
    remote_token: int
    remote_head: int
    local_begin: int
    local_token: int
    local_head: int
    length: int  # units of a head of a token


def find_patterns(
    local: CacheDescription, remote: CacheDescription, local_rank: int, *, received: bool
) -> tuple[Pattern, ...]:
    """The patterns that fill a group's pages of one local rank.

    `received`: pages arrive in the remote order of heads and tokens, and a permutation follows; else
    every fragment goes to its final position.
    """
    at = local.coordinates(local_rank)
    if not received and _holds_equal_pages(local, remote):
        return _whole_pages(local, remote, at)
    patterns = []
    for strides, unit_bytes in _units(local, remote):
        runs = _matching_runs(local, remote, at, strides, received)
        by_pipeline_rank = _descriptors(local, remote, at.pp_rank, unit_bytes)
        first_of_source = np.flatnonzero(np.diff(runs.source, prepend=-1))
        for first, last in zip(first_of_source, [*first_of_source[1:], len(runs.source)]):
            cp_rank, tp_rank = divmod(int(runs.source[first]), remote.tp_size)
            for unit_pattern in _unit_patterns(UnitRuns(*(column[first:last] for column in runs))):
                for pp_rank, descriptors in by_pipeline_rank.items():
                    source = remote.rank_of(Coordinates(cp_rank, pp_rank, tp_rank))
                    patterns += _in_bytes(local, remote, source, unit_pattern, strides, descriptors)
    return tuple(patterns)


def _holds_equal_pages(local: CacheDescription, remote: CacheDescription) -> bool:
    """Whether K or V is not contiguous in pages that are equal on both sides: these move whole."""
    same = ("block_size", "memory_order", "cp_world_size", "cp_interleave", "pp_size", "tp_size")
    return not local.placement.is_contiguous and all(
        getattr(local, name) == getattr(remote, name) for name in same
    )


def _whole_pages(
    local: CacheDescription, remote: CacheDescription, at: Coordinates
) -> tuple[Pattern, ...]:
    """Patterns that copy each region of a page whole, from the remote rank with the same coordinates."""
    patterns = []
    sizes, regions = local.region_bytes, np.arange(len(local.region_bytes))
    for size in np.unique(sizes).tolist():
        chosen = regions[sizes == size]
        remote_step = int(remote.region_strides[chosen[0]])
        local_step = int(local.region_strides[chosen[0]])
        zeros = np.zeros_like(chosen)
        runs = np.array([[0, 0, 0, 0, size]], np.int64)
        patterns.append(
            Pattern(
                remote.rank_of(at),
                np.stack([chosen, zeros, chosen, zeros], axis=1),
                np.zeros((1, 2), np.int64),
                runs,
                remote_step,
                local_step,
                _may_join(runs, remote_step, local_step),
            )
        )
    return tuple(patterns)


def _units(
    local: CacheDescription, remote: CacheDescription
) -> list[tuple[list[Strides], np.ndarray]]:
    """Groups of strides that are matched together, each with the bytes of a unit, int64[p].

    The bytes are 0 where K or V is not part of the group. K and V of equal strides are matched once,
    for both. Where either is not contiguous in a page, and V lies at the same distance from K in all
    layers, they are matched jointly: their descriptors begin where K does.
    """
    sides = remote.placement, local.placement
    head_bytes = local.head_bytes.tolist()
    is_split = not all(side.is_contiguous for side in sides)
    is_joint = is_split and all(side.has_equal_layers for side in sides)
    in_bytes = []
    for p, length in enumerate(head_bytes):
        row: list[int] = []
        for side in sides:
            begin = int(side.kv_offsets[0, p] - side.kv_offsets[0, 0]) if is_joint else 0
            row += [begin, int(side.token_strides[p]), int(side.head_strides[p])]
        in_bytes.append([*row, length])
    if is_joint:
        unit = gcd(*(value for row in in_bytes for value in row))
        unit_bytes = np.zeros(len(head_bytes), np.int64)
        unit_bytes[0] = unit
        return [([Strides(*(value // unit for value in row)) for row in in_bytes], unit_bytes)]
    found: dict[Strides, np.ndarray] = {}
    for p, row in enumerate(in_bytes):
        unit = gcd(*row)
        strides = Strides(*(value // unit for value in row))
        found.setdefault(strides, np.zeros(len(head_bytes), np.int64))[p] = unit
    return [([strides], unit_bytes) for strides, unit_bytes in found.items()]


def _matching_runs(
    local: CacheDescription,
    remote: CacheDescription,
    at: Coordinates,
    together: list[Strides],
    received: bool,
) -> UnitRuns:
    tokens_per_group = lcm(local.tokens_per_page, remote.tokens_per_page)
    token = np.arange(tokens_per_group // local.cp_world_size)  # this rank's tokens
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

    head = np.arange(len(heads))
    local_page, in_page = np.divmod(token[:, None], local.block_size)
    source = cp_rank[:, None] * remote.tp_size + tp_rank
    columns = []
    for strides in together:
        at_page, local_unit = (
            _received_units(local, remote, token[:, None], head)
            if received
            else (local_page, _units_of(strides[3:6], in_page, head))
        )
        remote_unit = _units_of(strides[:3], remote_token[:, None], remote_head)
        length = np.int64(strides.length)
        columns.append((source, remote_page[:, None], remote_unit, at_page, local_unit, length))
    shape = source.shape
    return _merged(
        UnitRuns(
            *(
                np.concatenate([np.broadcast_to(each, shape).ravel() for each in column])
                for column in zip(*columns)
            )
        )
    )


def _units_of(strides: tuple[int, int, int], token: np.ndarray, head: np.ndarray) -> np.ndarray:
    """The unit at which each head of each token begins in a page."""
    begin, token_stride, head_stride = strides
    return begin + token * token_stride + head * head_stride


def _received_units(
    local: CacheDescription, remote: CacheDescription, token: np.ndarray, head: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(page, unit in it) in the remote order. K and V are contiguous, and a unit is a head of a token."""
    block, in_block = np.divmod(token, remote.block_size)
    if remote.layout == "NHD":
        unit = token * len(head) + head
    else:
        unit = (block * len(head) + head) * remote.block_size + in_block
    return np.divmod(unit, local.block_size * len(head))


def _source_of_head(
    local: CacheDescription, remote: CacheDescription, at: Coordinates, head: int
) -> int:
    """The remote tensor-parallel rank that a head is read from.

    Readers of the head are the local ranks that hold it and whose layers lie in the same remote
    pipeline stage, as `KVTopology` counts them, times the context-parallel ranks.
    """
    holders = ranks_of_head(local.total_num_kv_heads, local.tp_size, head)
    stages = max(1, local.pp_size // remote.pp_size)
    reader = holders.index(at.tp_rank) * local.cp_world_size + at.cp_rank
    reader = reader * stages + at.pp_rank % stages
    num_readers = len(holders) * local.cp_world_size * stages
    return replica_for(head, remote.total_num_kv_heads, remote.tp_size, reader, num_readers)


def _merged(runs: UnitRuns) -> UnitRuns:
    """The runs sorted by source and local position, those that are contiguous on both sides merged."""
    page_end = int(runs.local_unit.max()) + 1
    group_end = (int(runs.local_page.max()) + 1) * page_end
    order = np.argsort(
        runs.source * group_end + runs.local_page * page_end + runs.local_unit, kind="stable"
    )
    runs = UnitRuns(*(column[order] for column in runs))
    apart = np.ones(len(order), bool)
    apart[1:] = (
        (np.diff(runs.source) != 0)
        | (np.diff(runs.remote_page) != 0)
        | (np.diff(runs.local_page) != 0)
        | (np.diff(runs.remote_unit) != runs.length[:-1])
        | (np.diff(runs.local_unit) != runs.length[:-1])
    )
    first = np.flatnonzero(apart)
    merged = UnitRuns(*(column[first] for column in runs))
    return merged._replace(length=np.add.reduceat(runs.length, first))


def _unit_patterns(runs: UnitRuns) -> list[UnitPattern]:
    """The runs of one source, factored: page pairs with the same offsets share one pattern."""
    pair = runs.local_page * (int(runs.remote_page.max()) + 1) + runs.remote_page
    order = np.lexsort((pair, runs.length))  # stable: keeps the local order within a pair
    pair, length = pair[order], runs.length[order]
    table = np.stack(runs[1:5], axis=1)[order]
    first = np.flatnonzero((np.diff(pair, prepend=-1) != 0) | (np.diff(length, prepend=-1) != 0))
    found: dict[tuple[int, bytes], tuple[np.ndarray, list[np.ndarray]]] = {}
    for begin, end in zip(first, [*first[1:], len(pair)]):
        first_run = table[begin]
        offsets = np.ascontiguousarray((table[begin:end] - first_run)[:, [1, 3]])
        _, first_runs = found.setdefault((int(length[begin]), offsets.tobytes()), (offsets, []))
        first_runs.append(first_run)
    return [
        UnitPattern(offsets, np.stack(first_runs), length)
        for (length, _), (offsets, first_runs) in found.items()
    ]


def _descriptors(
    local: CacheDescription, remote: CacheDescription, pp_rank: int, unit_bytes: np.ndarray
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """By remote pipeline rank, the layers that both it and the local rank hold, K and V each.

    int64[n, 4]: where they begin, as in `Pattern.layers`; int64[n]: the bytes of a unit. K or V whose
    unit has no bytes is left out.
    """
    layer = np.arange(local.layers_per_rank) + pp_rank * local.layers_per_rank
    owner, in_owner = np.divmod(layer, remote.layers_per_rank)
    columns = [
        array[layers]
        for placed, layers in (
            (remote.placement, in_owner),
            (local.placement, layer % local.layers_per_rank),
        )
        for array in (placed.regions, placed.kv_offsets)
    ]
    chosen = np.flatnonzero(unit_bytes)
    table = np.stack(columns, axis=2)[:, chosen]  # [layers, p, 4]
    found = {}
    for rank in range(int(owner[0]), int(owner[-1]) + 1):
        of_rank = table[owner == rank]
        found[rank] = of_rank.reshape(-1, 4), np.tile(unit_bytes[chosen], len(of_rank))
    return found


def _in_bytes(
    local: CacheDescription,
    remote: CacheDescription,
    source: int,
    unit_pattern: UnitPattern,
    together: list[Strides],
    descriptors: tuple[np.ndarray, np.ndarray],
) -> list[Pattern]:
    """Converts units to bytes and repeats them for all layers, K and V. Contiguous layers are merged."""
    layers, unit_bytes = descriptors
    length = sum(strides.length for strides in together)
    whole = local.block_size * local.heads_per_rank * length
    if unit_pattern.length == whole == remote.block_size * remote.heads_per_rank * length:
        layers, sizes = _merged_layers(layers, whole * unit_bytes)
        unit_bytes = sizes // whole  # merged layers have wider units
    kinds = np.stack(
        [unit_bytes, remote.region_strides[layers[:, 0]], local.region_strides[layers[:, 2]]],
        axis=1,
    )
    patterns = []
    for kind in sorted({tuple(row) for row in kinds.tolist()}):
        scale, remote_step, local_step = kind
        runs = np.empty((len(unit_pattern.first_runs), 5), np.int64)
        runs[:, :4] = unit_pattern.first_runs
        runs[:, 1::2] *= scale
        runs[:, 4] = unit_pattern.length * scale
        patterns.append(
            Pattern(
                source,
                layers[(kinds == kind).all(axis=1)],
                unit_pattern.offsets * scale,
                runs,
                remote_step,
                local_step,
                _may_join(runs, remote_step, local_step),
            )
        )
    return patterns


def _merged_layers(layers: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges K and V that begin where the one before ends on both sides; with the bytes of each."""
    order = np.lexsort((layers[:, 1], layers[:, 0]))
    layers, sizes = layers[order], sizes[order]
    begins = np.ones(len(layers), bool)
    meets = (layers[1:, 1::2] == layers[:-1, 1::2] + sizes[:-1, None]).all(axis=1)
    meets &= (layers[1:, ::2] == layers[:-1, ::2]).all(axis=1)
    begins[1:] = ~meets
    first = np.flatnonzero(begins)
    return layers[first], np.add.reduceat(sizes, first)


def _may_join(runs: np.ndarray, remote_stride: int, local_stride: int) -> bool:
    """Whether some page numbers let a run begin where the one before it ends, on both sides."""
    ends = runs[:, 1:5:2] + runs[:, 4:]
    begins_next = np.concatenate([runs[1:, 1:5:2], runs[:1, 1:5:2]])  # after the last the first
    return bool(((ends - begins_next) % (remote_stride, local_stride) == 0).all(axis=1).any())
