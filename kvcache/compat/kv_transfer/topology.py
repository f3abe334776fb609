# SPDX-License-Identifier: Apache-2.0
"""One worker's view of its own engine and of remote engines: ranks, sizes and shapes for KV transfer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeVar

from kvcache.checks import flag, instance, integer, listed, shown
from kvcache.layouts import (
    AttentionBackend,
    EngineBackend,
    backend,
    blocks_first,
    check_layout,
    engine_dims,
    engine_order,
)
from kvcache.specs import FrozenDict
from kvcache.transfer.sharding import (
    PipelineStage,
    check_stages,
    check_world_size,
    equal_stages,
    heads_of_rank,
    size_ratio,
    sources_of_rank,
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class RemoteEngine:
    """Parallel sizes and block size of another engine.

    Args:
        tp_size: Tensor-parallel size, at least 1. Must be 1 if `stages` is given.
        pp_size: Pipeline-parallel size, at least 1. Must be 1 if `stages` is given.
        block_size: Tokens per block, at least 1.
        stages: `(num_layers, tp_size)` of every pipeline stage, if the stages differ.

    Raises:
        ValueError: A size is below 1, or `stages` is given and `tp_size` or `pp_size` is not 1.

    Example:
        >>> RemoteEngine(tp_size=4, pp_size=2, block_size=16).world_size
        8
        >>> RemoteEngine(stages=[(30, 4), (2, 8)]).world_size
        12
    """

    tp_size: int = 1
    pp_size: int = 1
    block_size: int = 16
    stages: Sequence[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "block_size"):
            object.__setattr__(self, name, integer(getattr(self, name), name, 1))
        if self.stages is None:
            check_world_size(self.tp_size * self.pp_size)
            return
        object.__setattr__(self, "stages", check_stages(self.stages))
        check_world_size(self.world_size)
        for name in ("tp_size", "pp_size"):
            if getattr(self, name) != 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: expected 1, because stages specifies it"
                )

    @property
    def world_size(self) -> int:
        """Number of workers. Their global ranks are `pp_rank * tp_size + tp_rank`."""
        return sum(self.tp_sizes)

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """The tensor-parallel size of each pipeline stage."""
        if self.stages is None:
            return (self.tp_size,) * self.pp_size
        return tuple(stage.tp_size for stage in self.stages)


@dataclass(frozen=True)
class KVTopology:
    """One worker's ranks in its engine, and the ranks in other engines that store the same KV.

    Most methods that concern a remote engine have two variants: one with the engine's sizes as
    arguments, and one (`..._from_engine_id`) with the id of a registered engine.

    Args:
        engine_id: Id of the worker's own engine.
        tp_rank: Tensor-parallel rank of the worker.
        tp_size: Tensor-parallel size; with `stages`, the size of the worker's stage.
        pp_rank: Pipeline rank of the worker.
        pp_size: Number of pipeline stages.
        block_size: Tokens per block.
        total_num_kv_heads: Number of KV heads in the model, over all ranks.
        is_mla: Whether the model uses MLA.
        backend: A registered name (None: "MLA" for MLA, otherwise "FLASHINFER"), an
            `AttentionBackend`, or any object with
            `get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)` (or `shape`) and, for
            packed layers, `get_kv_cache_stride_order(include_num_layers_dimension=True)`.
        tensor_shape: Shape of the tensor registered for transfer, or None if not known yet. If it has
            one more dimension than the backend's shape, layers are packed together.
        kv_cache_layout: "NHD" or "HND".
        remotes: Mapping from id to engine for all remote engines. The attribute is a read-only copy. See
            `with_remote`.
        stages: `(num_layers, tp_size)` of every pipeline stage of this engine, if the stages
            differ.

    Raises:
        ValueError: A rank or size is out of range, two sizes of which one must divide the other do not,
            a backend or engine id is unknown, `is_mla` contradicts the backend, or `tensor_shape` has
            the wrong number of dimensions.

    Example:
        >>> topology = KVTopology("decode", tp_rank=1, tp_size=2, block_size=32, total_num_kv_heads=8)
        >>> topology = topology.with_remote("prefill", RemoteEngine(tp_size=4, block_size=16))
        >>> topology.tp_ratio(4), topology.block_size_ratio_from_engine_id("prefill")
        (-2, 2)
        >>> topology.get_target_remote_ranks_from_engine_id("prefill")  # (global, pp, tp) ranks
        [(2, 0, 2), (3, 0, 3)]
    """

    engine_id: str
    tp_rank: int
    tp_size: int
    pp_rank: int = 0
    pp_size: int = 1
    block_size: int = 16
    total_num_kv_heads: int = 1
    is_mla: bool = False
    backend: str | AttentionBackend | EngineBackend | None = None
    tensor_shape: Sequence[int] | None = None
    kv_cache_layout: str = "NHD"
    remotes: Mapping[str, RemoteEngine] = field(default_factory=dict, hash=False)
    stages: Sequence[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        instance(self.engine_id, str, "engine_id")
        for name in ("tp_size", "pp_size", "block_size", "total_num_kv_heads"):
            self._set(name, integer(getattr(self, name), name, 1))
        self._set("is_mla", flag(self.is_mla, "is_mla"))
        self._set("tp_rank", integer(self.tp_rank, "tp_rank", 0, self.tp_size - 1))
        self._set("pp_rank", integer(self.pp_rank, "pp_rank", 0, self.pp_size - 1))
        check_layout(self.kv_cache_layout, "kv_cache_layout")
        if self.stages is None:
            check_world_size(self.tp_size * self.pp_size)
        else:
            self._check_stages()
        heads_of_rank(self._num_heads, self.tp_size, self.tp_rank)
        instance(self.remotes, Mapping, "remotes")
        for engine_id, remote in self.remotes.items():
            self._check_remote(engine_id, remote)
        self._set("remotes", FrozenDict(self.remotes))
        if self.backend is None:
            self._set("backend", "MLA" if self.is_mla else "FLASHINFER")
        described = backend(self.backend) if isinstance(self.backend, str) else self.backend
        if isinstance(described, AttentionBackend) and described.is_mla != self.is_mla:
            raise ValueError(
                f"is_mla is {self.is_mla}, but backend {described.name!r} has is_mla {described.is_mla}: "
                "expected equal values"
            )
        own = isinstance(described, AttentionBackend)
        dims = described.dims if own else engine_dims(described)[0]
        packed = False
        if self.tensor_shape is not None:
            sizes = listed(self.tensor_shape, "tensor_shape")
            shape = tuple(integer(size, "a size in tensor_shape", 0) for size in sizes)
            self._set("tensor_shape", shape)
            if len(shape) not in (len(dims), len(dims) + 1):
                raise ValueError(
                    f"tensor_shape is {shape}, with {len(shape)} dimensions: expected {len(dims)}, as in "
                    f"the backend's shape, or {len(dims) + 1} if layers are packed together"
                )
            packed = len(shape) == len(dims) + 1
        order = dims
        if packed and own:
            order = described.memory_order(self.kv_cache_layout, cross_layers=True)
        elif packed:
            order = engine_order(described, dims, cross_layers=True)
        self._set("_cross_layers_blocks", packed)
        self._set("_blocks_first", blocks_first(dims, self.is_mla))
        self._set("_block_size_position", order.index("token") - len(order))

    def _check_stages(self) -> None:
        stages = check_stages(self.stages)
        check_world_size(sum(stage.tp_size for stage in stages))
        self._set("stages", stages)
        if len(stages) != self.pp_size:
            raise ValueError(
                f"pp_size is {self.pp_size}: expected {len(stages)}, the number of stages"
            )
        if stages[self.pp_rank].tp_size != self.tp_size:
            raise ValueError(
                f"tp_size is {self.tp_size}: expected {stages[self.pp_rank].tp_size}, the tp_size of "
                f"the worker's stage, {self.pp_rank}"
            )
        for stage in stages:
            heads_of_rank(self._num_heads, stage.tp_size, 0)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    # Shape of the cache.

    @property
    def is_kv_layout_blocks_first(self) -> bool:
        """Whether each block contains both K and V. False for MLA, which has no V."""
        return self._blocks_first

    @property
    def cross_layers_blocks(self) -> bool:
        """Whether `tensor_shape` is the shape of all layers packed together."""
        return self._cross_layers_blocks

    @property
    def split_k_and_v(self) -> bool:
        """Whether K and V are separate regions. False for packed layers and for MLA."""
        return not (self.cross_layers_blocks or self.is_mla or self.is_kv_layout_blocks_first)

    @property
    def block_size_position(self) -> int:
        """Index of the token dimension within a block, counted from the end (negative).

        The index refers to the shape in the backend's dimension order. If layers are packed, the index
        refers to the memory order instead, which is the shape of the tensor with all layers.

        Example:
            >>> KVTopology("a", tp_rank=0, tp_size=1, backend="FLASHINFER").block_size_position
            -3
        """
        return self._block_size_position

    # Ratios.

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Return the ratio of the local to the remote tensor-parallel size. If the remote size is
        larger, return the negative inverse ratio.
        """
        return size_ratio(self.tp_size, remote_tp_size, "tp_size")

    def pp_ratio(self, remote_pp_size: int) -> int:
        """Return the ratio of the local to the remote pipeline size, as `tp_ratio` does."""
        return size_ratio(self.pp_size, remote_pp_size, "pp_size")

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Return the ratio of the local to the remote block size, as `tp_ratio` does."""
        return size_ratio(self.block_size, remote_block_size, "block_size")

    def tp_ratio_from_engine_id(self, engine_id: str) -> int:
        """Return `tp_ratio` for a registered engine.

        Raises:
            ValueError: The engine is unknown, its stages have different tensor-parallel sizes, or
                the sizes do not divide evenly.
        """
        return self._of_engine(engine_id, lambda remote: self.tp_ratio(_one_tp_size(remote)))

    def block_size_ratio_from_engine_id(self, engine_id: str) -> int:
        """Return `block_size_ratio` for a registered engine."""
        return self._of_engine(engine_id, lambda remote: self.block_size_ratio(remote.block_size))

    # Engines.

    def with_remote(self, engine_id: str, remote: RemoteEngine) -> KVTopology:
        """Return a copy of this topology with one more engine.

        Args:
            engine_id: Id of the remote engine.
            remote: Sizes of the remote engine. Adding an engine again with the same sizes has no
                effect.

        Returns:
            A new topology.

        Raises:
            ValueError: The id is already registered with different sizes, the id is this engine's own,
                or the tensor-parallel size and the number of KV heads do not divide evenly (MLA accepts
                any size). Other sizes are checked only by the methods that use them.
        """
        instance(engine_id, str, "engine_id")
        instance(remote, RemoteEngine, "remote")
        known = self.remotes.get(engine_id, remote)
        if known != remote:
            raise ValueError(
                f"remote is {remote}: expected {known}, as registered for engine {engine_id!r}"
            )
        return replace(self, remotes={**self.remotes, engine_id: remote})

    def engine(self, engine_id: str) -> RemoteEngine:
        """Return the sizes of a registered engine or of this engine.

        Raises:
            ValueError: The id is unknown.
        """
        instance(engine_id, str, "engine_id")
        if engine_id == self.engine_id:
            if self.stages is not None:
                return RemoteEngine(block_size=self.block_size, stages=self.stages)
            return RemoteEngine(self.tp_size, self.pp_size, self.block_size)
        if engine_id not in self.remotes:
            known = ", ".join(repr(e) for e in (self.engine_id, *self.remotes))
            raise ValueError(f"engine_id is {engine_id!r}: expected one of {known}")
        return self.remotes[engine_id]

    def is_kv_replicated(self, engine_id: str) -> bool:
        """Return whether an engine (or one of its stages) has more tensor-parallel ranks than the model
        has KV heads.
        """
        return max(self.engine(engine_id).tp_sizes) > self.total_num_kv_heads

    def replicates_kv_cache(self, engine_id: str) -> bool:
        """Return whether several ranks of an engine store the same KV, because `is_kv_replicated` returns
        True or the model uses MLA.
        """
        return self.is_mla or self.is_kv_replicated(engine_id)

    # Ranks to read from.

    def get_target_remote_ranks(
        self, remote_tp_size: int, remote_pp_size: int = 1
    ) -> list[tuple[int, int, int]]:
        """Return the remote workers from which this worker reads.

        Each head of each layer on this worker is read from exactly one of the returned workers, and
        each of them provides at least one head. Layers are split evenly over pipeline ranks.

        Args:
            remote_tp_size: Tensor-parallel size of the remote engine.
            remote_pp_size: Pipeline-parallel size of the remote engine.

        Returns:
            `(global_rank, pp_rank, tp_rank)` in ascending order, with
            `global_rank = pp_rank * remote_tp_size + tp_rank`.

        Raises:
            ValueError: The sizes do not divide evenly.

        Example:
            >>> KVTopology("a", tp_rank=0, tp_size=1, pp_rank=1, pp_size=2, total_num_kv_heads=2,
            ...     ).get_target_remote_ranks(remote_tp_size=4, remote_pp_size=4)  # one replica per head
            [(8, 2, 0), (10, 2, 2), (12, 3, 0), (14, 3, 2)]
        """
        return self._targets(_sized(remote_tp_size, remote_pp_size))

    def get_target_remote_ranks_from_engine_id(self, engine_id: str) -> list[tuple[int, int, int]]:
        """Return `get_target_remote_ranks` for a registered engine. Stages may be uneven.

        With `stages` on either side, ranks are numbered stage by stage, and both engines must have
        the same number of layers. An engine without `stages` splits its layers evenly over its
        pipeline ranks.
        """
        return self._of_engine(engine_id, self._targets)

    def _targets(self, remote: RemoteEngine) -> list[tuple[int, int, int]]:
        mine, theirs = self._stages_of_both(remote)
        found = sources_of_rank(mine, theirs, self._num_heads, self.pp_rank, self.tp_rank)
        return [(_global_rank(theirs, *at), *at) for at in found]

    def _stages_of_both(
        self, remote: RemoteEngine
    ) -> tuple[Sequence[PipelineStage], Sequence[PipelineStage]]:
        """Check the sizes, and return the stages of both engines for the same number of layers."""
        given = [stages for stages in (self.stages, remote.stages) if stages is not None]
        if not given:
            self.pp_ratio(remote.pp_size)
            num_layers = max(self.pp_size, remote.pp_size)  # any multiple of both sizes
        else:
            counts = [sum(stage.num_layers for stage in stages) for stages in given]
            num_layers = counts[0]
            if counts[-1] != num_layers:
                raise ValueError(
                    f"local stages hold {num_layers} layers, but remote stages hold {counts[-1]}: "
                    "expected equal numbers of layers"
                )
        mine, theirs = (
            engine.stages or equal_stages(num_layers, engine.pp_size, engine.tp_size)
            for engine in (self, remote)
        )
        for tp_size in remote.tp_sizes:
            self.tp_ratio(tp_size)
            self._check_remote_heads(tp_size)
        return mine, theirs

    @property
    def _num_heads(self) -> int:
        return 1 if self.is_mla else self.total_num_kv_heads

    def _check_remote(self, engine_id: str, remote: RemoteEngine) -> None:
        instance(engine_id, str, "a key of remotes")
        instance(remote, RemoteEngine, f"remotes[{shown(engine_id)}]")
        if engine_id == self.engine_id:
            raise ValueError(f"engine {engine_id!r} is the local engine: expected remote engines")
        for tp_size in remote.tp_sizes:
            self._of_sides(engine_id, lambda: self._check_remote_heads(tp_size))  # noqa: B023

    def _check_remote_heads(self, remote_tp_size: int) -> None:
        heads = self._num_heads
        if heads % remote_tp_size and remote_tp_size % heads:
            raise ValueError(
                f"total_num_kv_heads is {heads}, remote tp_size is {remote_tp_size}: "
                "expected one to divide the other"
            )

    def _of_engine(self, engine_id: str, ask: Callable[[RemoteEngine], _T]) -> _T:
        remote = self.engine(engine_id)
        return self._of_sides(engine_id, lambda: ask(remote))

    def _of_sides(self, engine_id: str, ask: Callable[[], _T]) -> _T:
        """Call `ask`, and add the ids of both engines to the errors that it raises."""
        try:
            return ask()
        except ValueError as error:
            raise ValueError(
                f"local engine {self.engine_id!r}, remote engine {engine_id!r}: {error}"
            ) from error


class TpKVTopology(KVTopology):
    """`KVTopology` with the arguments of vLLM's `TpKVTopology`, for engines without pipelines.

    Args:
        tp_rank: Tensor-parallel rank of the worker.
        remote_tp_size: The tensor-parallel size of each engine, including this one. Engines may be added
            later.
        is_mla: Whether the model uses MLA.
        total_num_kv_heads: Number of KV heads in the model, over all ranks.
        attn_backend: The attention backend: a class, a name, or a list whose first entry is used.
        engine_id: Id of the worker's own engine.
        remote_block_size: The block size of each engine, including this one.
        tensor_shape: The shape of the registered tensor. See `KVTopology`.

    Raises:
        TypeError, ValueError: An argument is invalid. See `KVTopology`.
    """

    remote_tp_size: Mapping[str, int]
    remote_block_size: Mapping[str, int]

    def __init__(
        self,
        tp_rank: int,
        remote_tp_size: Mapping[str, int],
        is_mla: bool,
        total_num_kv_heads: int,
        attn_backend: str | AttentionBackend | EngineBackend | Sequence,
        engine_id: str,
        remote_block_size: Mapping[str, int],
        tensor_shape: Sequence[int] | None = None,
    ) -> None:
        sizes = {"remote_tp_size": remote_tp_size, "remote_block_size": remote_block_size}
        for name, each in sizes.items():
            instance(each, Mapping, name)
            if engine_id not in each:
                raise ValueError(f"{name} is {shown(each)}: expected the engine {engine_id!r}, too")
        if isinstance(attn_backend, list | tuple):
            if not attn_backend:
                raise ValueError("attn_backend is empty: expected one backend or more")
            attn_backend = attn_backend[0]
        super().__init__(
            engine_id,
            tp_rank,
            remote_tp_size[engine_id],
            block_size=remote_block_size[engine_id],
            total_num_kv_heads=total_num_kv_heads,
            is_mla=is_mla,
            backend=attn_backend,
            tensor_shape=tensor_shape,
        )
        self._set("remote_tp_size", remote_tp_size)
        self._set("remote_block_size", remote_block_size)

    def engine(self, engine_id: str) -> RemoteEngine:
        """Return the sizes of an engine in `remote_tp_size` and `remote_block_size`."""
        instance(engine_id, str, "engine_id")
        for name in ("remote_tp_size", "remote_block_size"):
            if engine_id not in (sizes := getattr(self, name)):
                raise ValueError(f"engine_id is {engine_id!r}: expected one of {name}, {[*sizes]}")
        return RemoteEngine(self.remote_tp_size[engine_id], 1, self.remote_block_size[engine_id])

    def with_remote(self, engine_id: str, remote: RemoteEngine) -> NoReturn:
        """Raise TypeError: engines are added to the mappings that the constructor was given."""
        raise TypeError(
            f"with_remote({engine_id!r}, {remote!r}): expected a KVTopology; add the engine to "
            "remote_tp_size and remote_block_size"
        )


def _sized(remote_tp_size: int, remote_pp_size: int) -> RemoteEngine:
    return RemoteEngine(
        integer(remote_tp_size, "remote tp_size", 1), integer(remote_pp_size, "remote pp_size", 1)
    )


def _one_tp_size(remote: RemoteEngine) -> int:
    sizes = set(remote.tp_sizes)
    if len(sizes) > 1:
        raise ValueError(
            f"stages have tp_size {sorted(sizes)}: expected the same tp_size for all stages"
        )
    return sizes.pop()


def _global_rank(stages: Sequence[PipelineStage], pp_rank: int, tp_rank: int) -> int:
    return sum(stage.tp_size for stage in stages[:pp_rank]) + tp_rank
