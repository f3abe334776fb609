# SPDX-License-Identifier: Apache-2.0
"""Determines which ranks of a reading engine read from each rank of the source engine.

A source rank waits for these readers before it releases pages.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm

import numpy as np

from kvcache.checks import instance, integer
from kvcache.transfer.description import CacheDescription, Coordinates
from kvcache.transfer.plan.patterns import (
    shared_stages,
    sources_of_heads,
    tokens_of_group,
)
from kvcache.transfer.plan.transfer_plan import check_same_content, pages_with
from kvcache.transfer.states import StateDescription, plan_states


def source_readers(
    readers: CacheDescription | StateDescription,
    source: CacheDescription | StateDescription,
    num_tokens: int | None = None,
    *,
    first_token: int = 0,
) -> tuple[tuple[int, ...], ...]:
    """Return, for each rank of `source`, the ranks of `readers` that read from it, in ascending order.

    A source rank may release a request's pages after all its readers have reported that they are
    done. Rank r is a reader of rank s if s is in the `remote_ranks` of
    `plan_transfer(readers, source, r)`. A replica without readers need not wait. For
    `StateDescription` objects, token ranges do not apply, because a rank reads a state as a whole
    (`plan_states`).

    Args:
        readers: The engine that reads.
        source: The engine that is read from.
        num_tokens: Number of tokens in the request. With context parallelism, a rank may hold none
            of a short request's tokens. None: assume at least one full group of pages, so that
            every reader holds tokens.
        first_token: First token to read, a multiple of the readers' `tokens_per_page`. The readers
            already hold the earlier tokens, as a prefix hit.

    Returns:
        A tuple of reader ranks for each rank of `source`.

    Raises:
        TypeError: See `plan_transfer` and `plan_states`.
        ValueError: The token range is invalid. `plan_transfer` and `plan_states` may raise it for
            other reasons.

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
        if (num_tokens, first_token) != (None, 0):
            raise ValueError(
                f"num_tokens is {num_tokens}, first_token is {first_token}: expected None and 0, because "
                "states have no tokens"
            )
        return _readers_of_states(readers, source)
    check_same_content(readers, source, ("readers", "source"))
    first_token = integer(first_token, "first_token")
    group = lcm(readers.tokens_per_page, source.tokens_per_page)
    if num_tokens is None:
        num_tokens = first_token + group
    integer(num_tokens, "num_tokens", 1)
    integer(first_token, "first_token", 0, num_tokens - 1)
    if first_token % readers.tokens_per_page:
        raise ValueError(
            f"first_token is {first_token}: expected a multiple of {readers.tokens_per_page}, the "
            "number of tokens per page of the readers"
        )
    # All groups between the first and the last have the same readers, so one of them suffices.
    spans = set()
    first_group, last_group = first_token // group, (num_tokens - 1) // group
    for number in {first_group, min(first_group + 1, last_group), last_group}:
        begin = number * group
        spans.add((max(first_token - begin, 0), min(num_tokens - begin, group)))
    shared = {pair for span in spans for pair in _cp_ranks_with_tokens(readers, source, span)}
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
    """Return each reader's coordinates and the (pp_rank, tp_rank) pairs of all ranks from which it
    reads.
    """
    found = []
    for rank in range(readers.world_size):
        at = readers.coordinates(rank)
        read = [
            (pp_rank, tp_rank)
            for pp_rank in shared_stages(source, readers.stage_caches[at.pp_rank].layers)
            for tp_rank in set(sources_of_heads(readers, source, at, pp_rank))
        ]
        found.append((*at, tuple(read)))
    return tuple(found)


@lru_cache(maxsize=256)
def _cp_ranks_with_tokens(
    readers: CacheDescription, source: CacheDescription, span: tuple[int, int]
) -> frozenset[tuple[int, int]]:
    """Return all (reader, source) pairs of context-parallel ranks that hold a common token.

    Only pages that hold tokens in `span`, a token range within a group, are considered.
    """
    if readers.cp_world_size == source.cp_world_size == 1:
        return frozenset([(0, 0)])
    group = lcm(readers.tokens_per_page, source.tokens_per_page)
    theirs = [
        pages_with(source, cp_rank, span, group // source.tokens_per_page)
        for cp_rank in range(source.cp_world_size)
    ]
    found = set()
    for cp_rank in range(readers.cp_world_size):
        held = tokens_of_group(readers, source, cp_rank)
        mine = pages_with(readers, cp_rank, span, group // readers.tokens_per_page)
        wanted = mine[held.local_page]
        for source_cp_rank in np.unique(held.remote_cp_rank[wanted]).tolist():
            of_source = wanted & (held.remote_cp_rank == source_cp_rank)
            if theirs[source_cp_rank][held.remote_page[of_source]].any():
                found.add((cp_rank, source_cp_rank))
    return frozenset(found)
