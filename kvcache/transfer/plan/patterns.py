# SPDX-License-Identifier: Apache-2.0
"""Finds a transfer plan's patterns by matching and merging the runs of a group's pages.

In every layout, one head of one token is contiguous in K or V of a layer. Offsets are first counted
in units. A unit is the size of one head of one token, or a fraction of that size if strides are not
multiples of it. Counted in units, all layers have the same layout, and usually so do K and V.
Therefore, heads of tokens are matched and merged once, then converted to bytes and repeated for
every layer. If heads or tokens precede layers in the memory order, layers are matched together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd, lcm
from typing import NamedTuple

import numpy as np

from kvcache.placement import full_memory_order
from kvcache.transfer.description import CacheDescription, Coordinates, StageCache
from kvcache.transfer.plan.fragments import Pattern
from kvcache.transfer.sharding import heads_of_rank, overlap, sources_of_heads


class UnitRuns(NamedTuple):
    """Runs that are contiguous on both sides, int64[n] per column, in units from the start of K or V."""

    source: np.ndarray  # cp_rank * tp_size + tp_rank of the remote rank
    remote_page: np.ndarray
    remote_unit: np.ndarray
    local_page: np.ndarray
    local_unit: np.ndarray
    length: np.ndarray


class UnitPattern(NamedTuple):
    """Repeated runs in units. Each of `offsets` is added to each of `first_runs`."""

    offsets: np.ndarray  # int64[k, 2]: (remote, local) units from the first run
    first_runs: np.ndarray  # int64[m, 4]: remote page, unit in it, local page, unit in it
    length: int  # length of each run in units


class UnitGroup(NamedTuple):
    """Parts of a page that are matched together, and the descriptors to which the resulting runs
    apply.

    strides: int64[s, 7] in units, one row for the K, V or scales of one layer or of all layers. The
        columns are the start, token stride and head stride on the remote side, the same on the
        local side, and the length of one head of one token.
    layers: int64[n, 4], as `Pattern.layers`. unit_bytes: int64[n].
    """

    strides: np.ndarray
    layers: np.ndarray
    unit_bytes: np.ndarray
    is_scales: bool


class TokensOfGroup(NamedTuple):
    """Each token's page within the group and index within the page, int64[n] per column."""

    local_page: np.ndarray
    local_token: np.ndarray
    remote_cp_rank: np.ndarray
    remote_page: np.ndarray
    remote_token: np.ndarray


class Sides(NamedTuple):
    """A local rank, paired with a remote pipeline stage that shares layers with it."""

    local: CacheDescription
    remote: CacheDescription
    at: Coordinates
    remote_pp_rank: int
    heads: tuple[int, ...]  # the local rank's heads to match, as numbered in the model
    sources: tuple[int, ...]  # remote tensor-parallel rank of each head
    mine: StageCache
    theirs: StageCache

    @classmethod
    def of(
        cls, local: CacheDescription, remote: CacheDescription, at: Coordinates, remote_pp_rank: int
    ) -> Sides:
        """Create the pair with all heads of the local rank."""
        mine, theirs = local.stage_caches[at.pp_rank], remote.stage_caches[remote_pp_rank]
        heads = tuple(heads_of_rank(local.total_num_kv_heads, mine.tp_size, at.tp_rank))
        sources = sources_of_heads(
            *(local.pipeline_stages, remote.pipeline_stages, remote_pp_rank),
            *(local.total_num_kv_heads, at, local.cp_world_size),
        )
        return cls(local, remote, at, remote_pp_rank, heads, tuple(sources), mine, theirs)

    def remote_heads(self) -> np.ndarray:
        """Return each head's index within the remote rank from which it is read, int64[heads]."""
        first = np.array(self.sources) * self.remote.total_num_kv_heads // self.theirs.tp_size
        return np.array(self.heads) - first

    def by_head(self) -> list[Sides]:
        """Split the pair into single heads if heads precede blocks in either side's memory order."""
        if not (self.mine.placement.head_regions or self.theirs.placement.head_regions):
            return [self]
        found = []
        for n, remote_head in enumerate(self.remote_heads().tolist()):
            mine, theirs = (
                replace(stage, heads_per_rank=1, placement=stage.placement.of_head(head))
                for stage, head in ((self.mine, n), (self.theirs, remote_head))
            )
            one = self._replace(heads=self.heads[n : n + 1], sources=self.sources[n : n + 1])
            found.append(one._replace(mine=mine, theirs=theirs))
        return found


def find_patterns(
    local: CacheDescription, remote: CacheDescription, local_rank: int, *, received: bool
) -> tuple[Pattern, ...]:
    """Find the patterns that fill a group's pages on one local rank.

    With `received`, pages arrive in the remote order of heads and tokens and are permuted later.
    Otherwise, every fragment is written to its final position.
    """
    at = local.coordinates(local_rank)
    patterns: list[Pattern] = []
    matched: dict[tuple, list[tuple[int, int, list[UnitPattern]]]] = {}
    for pp_rank in shared_stages(remote, local.stage_caches[at.pp_rank].layers):
        together = Sides.of(local, remote, at, pp_rank)
        if not received and _holds_equal_pages(together):
            patterns += _whole_pages(together)
            continue
        for sides in together.by_head():
            remote_heads = sides.remote_heads() if sides is together else np.zeros(1, np.int64)
            for group in _unit_groups(sides):
                exact = not received or group.is_scales
                # Stages with equal sizes have the same runs, and so do heads with the same source
                # rank.
                key = (group.strides.tobytes(), sides.sources, sides.theirs.tp_size, exact)
                if key not in matched:
                    runs = _matching_runs(sides, remote_heads, group.strides, not exact)
                    matched[key] = list(_by_source(runs, sides.theirs.tp_size))
                for cp_rank, tp_rank, unit_patterns in matched[key]:
                    source = remote.rank_of(Coordinates(cp_rank, pp_rank, tp_rank))
                    for unit_pattern in unit_patterns:
                        patterns += _in_bytes(sides, source, unit_pattern, group)
    return tuple(patterns)


def shared_stages(cache: CacheDescription, layers: range) -> list[int]:
    """Return those of an engine's pipeline stages that hold any of the layers."""
    return [
        pp_rank for pp_rank, stage in enumerate(cache.stage_caches) if overlap(stage.layers, layers)
    ]


def _holds_equal_pages(sides: Sides) -> bool:
    """Return whether to transfer whole pages: equal layouts, but K or V is not contiguous."""
    return (
        not sides.mine.placement.is_contiguous
        and sides.local.memory_order == sides.remote.memory_order
        and _have_equal_tokens(sides)
        and (sides.mine.layers, sides.mine.tp_size) == (sides.theirs.layers, sides.theirs.tp_size)
    )


def _have_equal_tokens(sides: Sides) -> bool:
    """Return whether corresponding pages hold the same tokens on both sides."""
    same = ("block_size", "cp_world_size", "cp_interleave")
    return all(getattr(sides.local, name) == getattr(sides.remote, name) for name in same)


def _have_equal_layers(sides: Sides) -> bool:
    """Return whether a run can continue from one layer to the next on both sides: tokens or heads
    precede layers in memory, and each layer stores the same data per token or head.
    """
    orders = [full_memory_order(each.memory_order) for each in (sides.remote, sides.local)]
    if any(order.index("layer") < order.index("block") for order in orders):
        return False  # each layer has its own region
    within = {role for order in orders for role in order[order.index("layer") :]}
    return ("token" not in within or _have_equal_tokens(sides)) and (
        "head" not in within or sides.mine.heads_per_rank == sides.theirs.heads_per_rank
    )


def _whole_pages(sides: Sides) -> list[Pattern]:
    """Return patterns that copy whole page regions from the remote rank with the same coordinates."""
    patterns = []
    (tp_rank,) = set(sides.sources)
    source = Coordinates(sides.at.cp_rank, sides.remote_pp_rank, tp_rank)
    sizes = sides.mine.placement.region_bytes
    regions = np.arange(len(sizes))
    for size in np.unique(sizes).tolist():
        chosen = regions[sizes == size]
        remote_step = int(sides.theirs.region_strides[chosen[0]])
        local_step = int(sides.mine.region_strides[chosen[0]])
        zeros = np.zeros_like(chosen)
        runs = np.array([[0, 0, 0, 0, size]], np.int64)
        patterns.append(
            Pattern(
                sides.remote.rank_of(source),
                np.stack([chosen, zeros, chosen, zeros], axis=1),
                np.zeros((1, 2), np.int64),
                runs,
                remote_step,
                local_step,
                _may_join(runs, remote_step, local_step),
            )
        )
    return patterns


def _unit_groups(sides: Sides) -> list[UnitGroup]:
    """Group the parts that are matched together. K and V with equal strides are matched only once.

    If K or V is not contiguous in a page, and V is at the same distance from K in all layers, they are
    matched jointly and their descriptors begin at K. If a run can also continue from one layer to the
    next, all layers are matched jointly with a single descriptor.
    """
    placements = sides.theirs.placement, sides.mine.placement
    rows = _layer_rows(sides)
    begins = [placed.kv_offsets[layers] for placed, layers in zip(placements, rows)]
    regions = [placed.regions[layers] for placed, layers in zip(placements, rows)]
    descriptors = np.stack([regions[0], begins[0], regions[1], begins[1]], axis=2)  # [layers, p, 4]
    num_layers, num_parts = descriptors.shape[:2]
    is_split = not all(placed.is_contiguous for placed in placements)
    is_joint = is_split and all(placed.has_equal_layers for placed in placements)

    by_part = np.zeros((num_parts, 7), np.int64)  # strides in bytes; starts are added below
    for side, placed in enumerate(placements):
        by_part[:, 3 * side + 1] = placed.token_strides
        by_part[:, 3 * side + 2] = placed.head_strides
    by_part[:, 6] = sides.local.head_bytes
    if is_joint:
        num_together = num_layers if _have_equal_layers(sides) else 1
        table = np.tile(by_part, (num_together, 1))
        begins = descriptors[:num_together, :, 1::2] - descriptors[0, 0, 1::2]
        table[:, [0, 3]] = begins.reshape(-1, 2)
        unit = np.gcd.reduce(table, axis=None)
        layers = descriptors[: num_layers // num_together, 0]
        return [UnitGroup(table // unit, layers, np.full(len(layers), unit), False)]
    found: dict[tuple[tuple[int, ...], bool], list[tuple[int, int]]] = {}
    for p, row in enumerate(by_part.tolist()):
        unit = gcd(*row)
        strides = tuple(value // unit for value in row)
        is_scales = bool(sides.local.scale_bytes_per_head) and p == num_parts - 1
        found.setdefault((strides, is_scales), []).append((p, unit))
    groups = []
    for (strides, is_scales), parts in found.items():
        layers = descriptors[:, [p for p, _ in parts]].reshape(-1, 4)
        unit_bytes = np.tile(np.array([unit for _, unit in parts], np.int64), num_layers)
        groups.append(UnitGroup(np.array([strides], np.int64), layers, unit_bytes, is_scales))
    return groups


def _layer_rows(sides: Sides) -> tuple[slice, slice]:
    """Return slices that select, on the remote and the local rank, the layers of both sides."""
    mine, theirs = sides.mine.layers, sides.theirs.layers
    first, last = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
    return tuple(slice(first - held.start, last - held.start) for held in (theirs, mine))


def _matching_runs(
    sides: Sides, remote_head: np.ndarray, strides: np.ndarray, received: bool
) -> UnitRuns:
    local, remote, at = sides[:3]
    tokens = tokens_of_group(local, remote, at.cp_rank)
    head = np.arange(len(sides.heads))
    source = tokens.remote_cp_rank[:, None] * sides.theirs.tp_size + np.array(sides.sources)
    remote_unit = _units_of(strides[:, :3], tokens.remote_token, remote_head)
    if received:
        of_rank = np.arange(len(tokens.local_page))[:, None]
        local_page, local_unit = _received_units(local, remote, of_rank, head)
    else:
        local_page = tokens.local_page[:, None]
        local_unit = _units_of(strides[:, 3:6], tokens.local_token, head)
    length = strides[:, 6, None, None]
    columns = (source, tokens.remote_page[:, None], remote_unit, local_page, local_unit, length)
    return _merged(
        UnitRuns(*(np.broadcast_to(column, remote_unit.shape).ravel() for column in columns))
    )


def tokens_of_group(
    local: CacheDescription, remote: CacheDescription, cp_rank: int
) -> TokensOfGroup:
    """Return the positions of a group's tokens on a local context-parallel rank, in token order."""
    tokens_per_group = lcm(local.tokens_per_page, remote.tokens_per_page)
    token = np.arange(tokens_per_group // local.cp_world_size)
    local_page, local_token = np.divmod(token, local.block_size)
    chunk, in_chunk = np.divmod(token, local.cp_interleave)
    position = (chunk * local.cp_world_size + cp_rank) * local.cp_interleave + in_chunk
    chunk, in_chunk = np.divmod(position, remote.cp_interleave)
    chunk, remote_cp_rank = np.divmod(chunk, remote.cp_world_size)
    remote_page, remote_token = np.divmod(
        chunk * remote.cp_interleave + in_chunk, remote.block_size
    )
    return TokensOfGroup(local_page, local_token, remote_cp_rank, remote_page, remote_token)


def _units_of(strides: np.ndarray, token: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Return the first unit of each token's heads within a page, int64[s, tokens, heads]."""
    begin, token_stride, head_stride = strides.T[:, :, None, None]
    return begin + token[:, None] * token_stride + head * head_stride


def _received_units(
    local: CacheDescription, remote: CacheDescription, token: np.ndarray, head: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (page, head of a token within the page) of each token's heads, in the remote order."""
    block, in_block = np.divmod(token, remote.block_size)
    if remote.layout == "NHD":
        unit = token * len(head) + head
    else:
        unit = (block * len(head) + head) * remote.block_size + in_block
    return np.divmod(unit, local.block_size * len(head))


def _merged(runs: UnitRuns) -> UnitRuns:
    """Sort runs by source and local position, and merge runs that are contiguous on both sides."""
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


def _by_source(runs: UnitRuns, tp_size: int) -> Iterator[tuple[int, int, list[UnitPattern]]]:
    """Yield (cp_rank, tp_rank, patterns) for each source rank."""
    first_of_source = np.flatnonzero(np.diff(runs.source, prepend=-1))
    for first, last in zip(first_of_source, [*first_of_source[1:], len(runs.source)]):
        of_source = UnitRuns(*(column[first:last] for column in runs))
        yield *divmod(int(runs.source[first]), tp_size), _unit_patterns(of_source)


def _unit_patterns(runs: UnitRuns) -> list[UnitPattern]:
    """Factor the runs from one source rank. Page pairs with the same offsets share a pattern."""
    pair = runs.local_page * (int(runs.remote_page.max()) + 1) + runs.remote_page
    order = np.lexsort((pair, runs.length))  # a stable sort keeps the local order within a pair
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


def _in_bytes(
    sides: Sides, source: int, unit_pattern: UnitPattern, group: UnitGroup
) -> list[Pattern]:
    """Convert a pattern to bytes, for K and V of all layers. Contiguous layers are merged."""
    layers, unit_bytes = group.layers, group.unit_bytes
    length = int(group.strides[:, 6].sum())
    mine, theirs = (
        cache.block_size * stage.heads_per_rank * length
        for cache, stage in ((sides.local, sides.mine), (sides.remote, sides.theirs))
    )
    if unit_pattern.length == mine == theirs:
        layers, sizes = _merged_layers(layers, mine * unit_bytes)
        unit_bytes = sizes // mine  # merged layers have wider units
    kinds = np.stack(
        [
            unit_bytes,
            sides.theirs.region_strides[layers[:, 0]],
            sides.mine.region_strides[layers[:, 2]],
        ],
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
    """Return parts, merged where they are adjacent on both sides, and their sizes in bytes."""
    order = np.lexsort((layers[:, 1], layers[:, 0]))
    layers, sizes = layers[order], sizes[order]
    begins = np.ones(len(layers), bool)
    meets = (layers[1:, 1::2] == layers[:-1, 1::2] + sizes[:-1, None]).all(axis=1)
    meets &= (layers[1:, ::2] == layers[:-1, ::2]).all(axis=1)
    begins[1:] = ~meets
    first = np.flatnonzero(begins)
    return layers[first], np.add.reduceat(sizes, first)


def _may_join(runs: np.ndarray, remote_stride: int, local_stride: int) -> bool:
    """Return whether, for some page numbers, a run starts where the previous run ends on both sides."""
    ends = runs[:, 1:5:2] + runs[:, 4:]
    # The first run follows the last run of the previous group.
    begins_next = np.concatenate([runs[1:, 1:5:2], runs[:1, 1:5:2]])
    return bool(((ends - begins_next) % (remote_stride, local_stride) == 0).all(axis=1).any())
