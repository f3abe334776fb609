# SPDX-License-Identifier: Apache-2.0
"""Determines which ranks of a reading engine read from each rank of the source engine.

A source rank waits for these readers before it releases pages.
"""

from __future__ import annotations

from functools import lru_cache

from kvcache.checks import instance
from kvcache.transfer.description import CacheDescription, Coordinates
from kvcache.transfer.plan.patterns import shared_stages, tokens_of_group
from kvcache.transfer.plan.transfer_plan import check_same_content
from kvcache.transfer.sharding import sources_of_heads
from kvcache.transfer.states import StateDescription, plan_states


def source_readers(
    readers: CacheDescription | StateDescription, source: CacheDescription | StateDescription
) -> tuple[tuple[int, ...], ...]:
    """Return, for each rank of `source`, the ranks of `readers` that read from it, in ascending order.

    A source rank may release a request's pages after all its readers have reported that they are
    done. Rank r is a reader of rank s if s is in the `remote_ranks` of
    `plan_transfer(readers, source, r)`, or of `plan_states` for `StateDescription` objects. A replica
    without readers need not wait.

    Args:
        readers: The engine that reads.
        source: The engine that is read from.

    Returns:
        A tuple of reader ranks for each rank of `source`.

    Raises:
        TypeError, ValueError: See `plan_transfer` and `plan_states`.

    Example:
        >>> from dataclasses import replace
        >>> decode = CacheDescription(engine_id="d", num_layers=2, total_num_kv_heads=2, head_size=64,
        ...     block_size=16, tp_size=4)
        >>> source_readers(decode, replace(decode, engine_id="p", tp_size=1, pp_size=2))
        ((0, 1, 2, 3), (0, 1, 2, 3))
        >>> source_readers(replace(decode, tp_size=1), decode)  # each head has two replicas
        ((0,), (), (0,), ())
    """
    kind = StateDescription if isinstance(readers, StateDescription) else CacheDescription
    for name, description in (("readers", readers), ("source", source)):
        instance(description, kind, name)
    if isinstance(readers, StateDescription):
        return _readers_of_states(readers, source)
    check_same_content(readers, source, ("readers", "source"))
    shared = _cp_ranks_with_tokens(readers, source)
    found: list[set[int]] = [set() for _ in range(source.world_size)]
    for cp_rank, pp_rank, tp_rank, of_stage in _sources(readers, source):
        for source_cp_rank in range(source.cp_world_size):
            if (cp_rank, source_cp_rank) in shared:
                reader = readers.rank_of(Coordinates(cp_rank, pp_rank, tp_rank))
                for source_pp_rank, source_tp_rank in of_stage:
                    at = Coordinates(source_cp_rank, source_pp_rank, source_tp_rank)
                    found[source.rank_of(at)].add(reader)
    return tuple(tuple(sorted(each)) for each in found)


@lru_cache(maxsize=64)
def _readers_of_states(
    readers: StateDescription, source: StateDescription
) -> tuple[tuple[int, ...], ...]:
    plans = [plan_states(readers, source, rank) for rank in range(readers.world_size)]
    return tuple(
        tuple(rank for rank, plan in enumerate(plans) if number in plan.remote_ranks)
        for number in range(source.world_size)
    )


@lru_cache(maxsize=64)
def _sources(
    readers: CacheDescription, source: CacheDescription
) -> tuple[tuple[int, int, int, tuple[tuple[int, int], ...]], ...]:
    """Return each reader's coordinates, and the (pp_rank, tp_rank) of all ranks that it reads."""
    stages, found = (readers.pipeline_stages, source.pipeline_stages), []
    heads, cp_world_size = readers.total_num_kv_heads, readers.cp_world_size
    for rank in range(readers.world_size):
        at = readers.coordinates(rank)
        read = [
            (pp_rank, tp_rank)
            for pp_rank in shared_stages(source, readers.stage_caches[at.pp_rank].layers)
            for tp_rank in {*sources_of_heads(*stages, pp_rank, heads, at, cp_world_size)}
        ]
        found.append((*at, tuple(read)))
    return tuple(found)


@lru_cache(maxsize=64)
def _cp_ranks_with_tokens(
    readers: CacheDescription, source: CacheDescription
) -> frozenset[tuple[int, int]]:
    """Return all (reader, source) pairs of context-parallel ranks that hold a common token."""
    return frozenset(
        (cp_rank, source_cp_rank)
        for cp_rank in range(readers.cp_world_size)
        for source_cp_rank in set(tokens_of_group(readers, source, cp_rank).remote_cp_rank.tolist())
    )
