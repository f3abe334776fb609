# SPDX-License-Identifier: Apache-2.0
"""Transfers of recurrent states: which slices of a state each rank holds, and plans for reading
these slices from another engine.

A state consists of a few tensors, such as the last inputs of a convolution, or the state of an SSM or of
linear attention. Each has a channel dimension that is spread over tensor-parallel ranks section by
section. For example, Mamba-2's convolution has sections x, B and C, and each rank holds a slice of
each section. A page holds one layer's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from kvcache.checks import (
    MAX_LAYERS,
    Size,
    Text,
    as_array,
    dtype_name,
    instance,
    integer,
    listed,
    named_sizes,
    plain_fields,
    shown,
)
from kvcache.specs import ELEMENT_BYTES
from kvcache.transfer.description import (
    DESCRIPTION_VERSION,
    Coordinates,
    EngineDescription,
    check_fields,
    check_mapping,
    check_version,
    plain,
)
from kvcache.transfer.plan.fragments import Pattern, TransferRuns
from kvcache.transfer.plan.transfer_plan import PatternPlan
from kvcache.transfer.sharding import (
    PipelineStage,
    check_page_stride,
    check_stages_of,
    check_world_size,
    heads_of_rank,
    layers_of_stages,
    sources_of_heads,
)


class Section(NamedTuple):
    """A range of a tensor's channels that is distributed over ranks independently of other sections.

    The section has `units` (heads, groups or single channels) of `unit_size` channels each. Like KV
    heads, units are spread over tensor-parallel ranks. A unit is never split. If there are more
    ranks than units, several ranks hold the same unit.
    """

    units: int
    unit_size: int = 1


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One tensor of a recurrent state.

    Args:
        sections: (units, channels per unit) of each section, in channel order.
        row_size: Number of elements per channel.
        dtype: Element type.
        channels_last: Whether the memory order is [row_size, channels] instead of [channels, row_size].

    Example:
        >>> ssm = StateTensor(sections=[(128, 1)], row_size=64 * 128, dtype="float32")  # heads
        >>> conv = StateTensor(sections=[(128, 64), (8, 128), (8, 128)], row_size=3, channels_last=True)
        >>> conv.num_bytes(tp_size=4), ssm.num_bytes(tp_size=4)
        (15360, 1048576)
    """

    sections: tuple[Section, ...]
    row_size: Size = 1
    channels_last: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "sections", named_sizes(self.sections, Section, "sections", (1, 1))
        )
        object.__setattr__(self, "dtype", dtype_name(self.dtype, ELEMENT_BYTES))
        plain_fields(self)

    def channels(self, tp_size: int) -> int:
        """Return the number of channels that each of `tp_size` ranks holds.

        Raises ValueError if a section cannot be distributed over the ranks.
        """
        tp_size = integer(tp_size, "tp_size", 1)
        for number, (units, _) in enumerate(self.sections):
            if units % tp_size and tp_size % units:
                raise ValueError(
                    f"sections[{number}] has {units} units, tp_size is {tp_size}: "
                    "expected one to divide the other"
                )
        return sum(
            len(heads_of_rank(section.units, tp_size, 0)) * section.unit_size
            for section in self.sections
        )

    def num_bytes(self, tp_size: int) -> int:
        """Return the number of the tensor's bytes that each of `tp_size` ranks holds."""
        return self.channels(tp_size) * self.row_size * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class StateDescription(EngineDescription):
    """Describes an engine's recurrent states, for one group of layers with equal tensors.

    Each layer has its own region. A page holds one state, with its `tensors` concatenated. Tensors
    in separate memory need separate descriptions. Parallel sizes and ranks are defined as in
    `CacheDescription`. All context-parallel ranks hold the same states. A description consists of
    plain values, so it can be pickled, and `to_dict` returns JSON values.

    Args:
        tensors: The tensors of a state.
        page_stride: Distance in bytes between pages that are padded because they are shared with
            attention groups, as one value for all stages or one per stage.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range, or sizes do not divide each other.

    Example:
        >>> mamba = StateDescription(engine_id="prefill", num_layers=4, tp_size=2, tensors=[
        ...     StateTensor(sections=[(8, 16), (2, 32), (2, 32)], row_size=3, channels_last=True),
        ...     StateTensor(sections=[(8, 1)], row_size=16 * 32, dtype="float32")])
        >>> mamba.state_bytes(rank=0)
        8960
        >>> StateDescription.from_dict(mamba.to_dict()) == mamba
        True
    """

    engine_id: Text
    num_layers: Size
    tensors: tuple[StateTensor, ...]
    tp_size: Size = 1
    pp_size: Size = 1
    cp_world_size: Size = 1
    stages: tuple[PipelineStage, ...] | None = None
    page_stride: int | tuple[int, ...] | None = None
    version: int = DESCRIPTION_VERSION

    def __post_init__(self) -> None:
        check_version(self.version, self.engine_id)
        integer(self.num_layers, "num_layers", 1, MAX_LAYERS)
        plain_fields(self)
        tensors = tuple(listed(self.tensors, "tensors"))
        if not tensors or not all(isinstance(tensor, StateTensor) for tensor in tensors):
            raise TypeError(f"tensors is {shown(self.tensors)}: expected one StateTensor or more")
        object.__setattr__(self, "tensors", tensors)
        if self.stages is not None:
            stages = check_stages_of(
                self.stages, self.num_layers, pp_size=self.pp_size, tp_size=self.tp_size
            )
            object.__setattr__(self, "stages", stages)
        check_world_size(self.world_size)
        # Raises ValueError if a stage's ranks cannot share the state.
        page_bytes = [self._bytes_of(stage.tp_size) for stage in self.pipeline_stages]
        if self.page_stride is not None:
            page_stride = check_page_stride(self.page_stride, page_bytes)
            object.__setattr__(self, "page_stride", page_stride)

    def to_dict(self) -> dict[str, object]:
        """Return the fields, keyed by name, as JSON values."""
        tensors = [{name: plain(value) for name, value in vars(t).items()} for t in self.tensors]
        return {**super().to_dict(), "tensors": tensors}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> StateDescription:
        """Create a description from the result of `to_dict`.

        Raises the errors of `EngineDescription.from_dict`.
        """
        check_mapping(values)
        check_fields(cls, values)
        tensors = listed(values["tensors"], "tensors")
        for number, tensor in enumerate(tensors):
            check_mapping(tensor, where := f" of tensors[{number}]")
            check_fields(StateTensor, tensor, where)
        return cls(**{**values, "tensors": [StateTensor(**tensor) for tensor in tensors]})

    def layers(self, rank: int) -> range:
        """Return the layers that a rank holds, as numbered in the group."""
        return layers_of_stages(self.pipeline_stages)[self.coordinates(rank).pp_rank]

    def state_bytes(self, rank: int) -> int:
        """Return the bytes of a layer's state on a rank (`LayerSpec.state_bytes`)."""
        return self._bytes_of(self.pipeline_stages[self.coordinates(rank).pp_rank].tp_size)

    def stride_of(self, pp_rank: int) -> int:
        """Return the page stride in bytes on the ranks of a pipeline stage."""
        pp_rank = integer(pp_rank, "pp_rank", 0, len(self.pipeline_stages) - 1)
        if isinstance(self.page_stride, tuple):
            return self.page_stride[pp_rank]
        return self.page_stride or self._bytes_of(self.pipeline_stages[pp_rank].tp_size)

    def _bytes_of(self, tp_size: int) -> int:
        return sum(tensor.num_bytes(tp_size) for tensor in self.tensors)


@dataclass(frozen=True, eq=False)
class StateTransferPlan(PatternPlan):
    """A plan for filling one local rank's state pages from a remote engine. Created by `plan_states`.

    A group consists of one page on each side. `remote_ranks`, `patterns` and
    `fragments` describe one state in all of the rank's layers.
    """

    local: StateDescription
    remote: StateDescription
    local_rank: int

    def apply(
        self, local_pages: np.ndarray, remote_pages: Mapping[int, np.ndarray] | np.ndarray
    ) -> TransferRuns:
        """Return the byte runs that fill the given pages. See `TransferPlan.apply`.

        Args:
            local_pages: int[n]. Local page numbers.
            remote_pages: int[n]. Remote page numbers, as one array for all remote ranks or a
                mapping from remote rank to array.
        """
        if isinstance(remote_pages, Mapping):
            remote = {rank: _column(ids, "remote_pages") for rank, ids in remote_pages.items()}
        else:
            remote = _column(remote_pages, "remote_pages")
        return super().apply(_column(local_pages, "local_pages"), remote)


def plan_states(
    local: StateDescription, remote: StateDescription, local_rank: int
) -> StateTransferPlan:
    """Plan how a local rank fills its pages with the corresponding states of a remote engine.

    Parallel sizes, padding and the memory order of channels may differ. Each unit of a section is
    read from one rank. If several ranks hold a unit, local ranks are distributed over them.

    Args:
        local: The local engine.
        remote: The remote engine.
        local_rank: The local rank.

    Returns:
        The plan.

    Raises:
        ValueError: Layers or tensors differ in more than `channels_last`, or the rank is out of range.

    Example:
        >>> from dataclasses import replace
        >>> mamba = StateDescription(engine_id="prefill", num_layers=2, tp_size=4, tensors=[
        ...     StateTensor(sections=[(8, 16), (2, 32), (2, 32)], row_size=3),
        ...     StateTensor(sections=[(8, 1)], row_size=16 * 32, dtype="float32")])
        >>> plan = plan_states(replace(mamba, engine_id="decode", tp_size=2), mamba, local_rank=1)
        >>> plan.remote_ranks, plan.num_fragments  # x and heads of both, B and C of one: 4 of each layer
        ((2, 3), 8)
    """
    for name, description in (("local", local), ("remote", remote)):
        instance(description, StateDescription, name)
    integer(local_rank, "local_rank", 0, local.world_size - 1)
    for name, mine, theirs in (
        ("num_layers", local.num_layers, remote.num_layers),
        ("tensors", *([_content(t) for t in side.tensors] for side in (local, remote))),
    ):
        if mine != theirs:
            raise ValueError(
                f"local {name} is {mine!r} (engine {local.engine_id!r}), but "
                f"remote {name} is {theirs!r} (engine {remote.engine_id!r}): expected equal values"
            )
    at = local.coordinates(local_rank)
    mine = layers_of_stages(local.pipeline_stages)[at.pp_rank]
    patterns: list[Pattern] = []
    for pp_rank, theirs in enumerate(layers_of_stages(remote.pipeline_stages)):
        shared = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
        if len(shared) == 0:
            continue
        layers = np.zeros((len(shared), 4), np.int64)
        layers[:, 0] = np.array(shared) - theirs.start
        layers[:, 2] = np.array(shared) - mine.start
        strides = remote.stride_of(pp_rank), local.stride_of(at.pp_rank)
        for tp_rank, runs in _runs_by_source(local, remote, at, pp_rank):
            # All context-parallel ranks hold the same state. If the engines have equal sizes, each
            # rank reads from the rank with its own index.
            source = Coordinates(at.cp_rank % remote.cp_world_size, pp_rank, tp_rank)
            joins = len(runs) == 1 and (runs[0, 4] == strides).all()
            offsets = np.zeros((1, 2), np.int64)
            patterns.append(
                Pattern(remote.rank_of(source), layers, offsets, runs, *strides, bool(joins))
            )
    return StateTransferPlan(tuple(patterns), 1, 1, local, remote, local_rank)


def _runs_by_source(
    local: StateDescription, remote: StateDescription, at: Coordinates, remote_pp_rank: int
) -> list[tuple[int, np.ndarray]]:
    """Return one layer's merged runs (see `Pattern.runs`), keyed by remote tensor-parallel rank."""
    tp_size = local.pipeline_stages[at.pp_rank].tp_size
    remote_tp_size = remote.pipeline_stages[remote_pp_rank].tp_size
    columns = []  # rows of (source, remote byte, local byte, length)
    begins = np.zeros(2, np.int64)  # start of the current tensor in the remote and the local page
    for theirs, mine in zip(remote.tensors, local.tensors):
        source, remote_channel, local_channel = _channels(
            local, remote, at, remote_pp_rank, mine.sections
        )
        item, rows = ELEMENT_BYTES[mine.dtype], mine.row_size
        if mine.channels_last or theirs.channels_last:
            row, length = np.arange(rows), item
        else:  # each channel is contiguous on both sides
            row, length = np.zeros(1, np.int64), rows * item
        found = []
        for tensor, channel, size, begin in (
            (theirs, remote_channel, remote_tp_size, begins[0]),
            (mine, local_channel, tp_size, begins[1]),
        ):
            steps = (1, tensor.channels(size)) if tensor.channels_last else (rows, 1)
            found.append(begin + (channel[:, None] * steps[0] + row * steps[1]) * item)
        columns.append(
            np.stack(
                [np.broadcast_to(each, found[0].shape).ravel()
                 for each in (source[:, None], *found, np.int64(length))]
            )
        )  # fmt: skip
        begins += theirs.num_bytes(remote_tp_size), mine.num_bytes(tp_size)
    table = np.concatenate(columns, axis=1)
    table = table[:, np.lexsort((table[2], table[0]))]
    apart = np.ones(table.shape[1], bool)
    ends = table[1:3, :-1] + table[3, :-1]
    apart[1:] = (np.diff(table[0]) != 0) | (table[1:3, 1:] != ends).any(axis=0)
    first = np.flatnonzero(apart)
    source, remote_byte, local_byte = table[:3, first]
    runs = np.zeros((len(first), 5), np.int64)
    runs[:, 1], runs[:, 3] = remote_byte, local_byte
    runs[:, 4] = np.add.reduceat(table[3], first)
    return [(int(rank), runs[source == rank]) for rank in np.unique(source)]


def _channels(
    local: StateDescription,
    remote: StateDescription,
    at: Coordinates,
    remote_pp_rank: int,
    sections: tuple[Section, ...],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a local rank's channels, int64[n]: remote tp_rank, remote index, local index."""
    tp_size = local.pipeline_stages[at.pp_rank].tp_size
    remote_tp_size = remote.pipeline_stages[remote_pp_rank].tp_size
    found = []
    firsts = [
        [0, *accumulate(len(heads_of_rank(units, size, 0)) * n for units, n in sections)]
        for size in (remote_tp_size, tp_size)
    ]
    for (units, unit_size), remote_first, local_first in zip(sections, *firsts):
        held = heads_of_rank(units, tp_size, at.tp_rank)
        unit = np.array(held)
        if units >= remote_tp_size:  # each unit is held by a single rank
            source = unit * remote_tp_size // units
        else:
            stages = local.pipeline_stages, remote.pipeline_stages
            own = (0, at.pp_rank, at.tp_rank)
            source = np.array(sources_of_heads(*stages, remote_pp_rank, units, own))
        in_source = unit - source * units // remote_tp_size
        within = np.arange(unit_size)
        found.append(
            [
                np.repeat(source, unit_size),
                (remote_first + in_source[:, None] * unit_size + within).ravel(),
                local_first + np.arange(len(unit) * unit_size),
            ]
        )
    source, remote_channel, local_channel = (np.concatenate(column) for column in zip(*found))
    return source, remote_channel, local_channel


def _content(tensor: StateTensor) -> tuple:
    return tuple(map(tuple, tensor.sections)), tensor.row_size, tensor.dtype


def _column(ids: np.ndarray, name: str) -> np.ndarray:
    given = as_array(ids, name)
    return given[:, None] if given.ndim == 1 else given
