# SPDX-License-Identifier: Apache-2.0
"""The transfer plan of a local rank, which defines what remote bytes fill its pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import NamedTuple

import numpy as np

from kvcache.checks import flag, instance, integer
from kvcache.transfer.description import CacheDescription
from kvcache.transfer.plan.fragments import (
    GroupFragments,
    Pattern,
    TransferRuns,
    check_each_once,
    expand_pattern,
    joined,
    page_ids,
    remote_page_ids,
)
from kvcache.transfer.plan.patterns import find_patterns, shared_stages

_MOST_HEADS = 1 << 22  # maximum number of (token, head) pairs per group; planning visits each pair
# Fields that must be equal in both engines. The error message names the first that differs.
_SAME = (
    "is_mla",
    "num_layers",
    "total_num_kv_heads",
    "head_size",
    "v_head_size",
    "dtype",
    "scale_bytes_per_head",
    "kv_format",
)


class ReceivePermutation(NamedTuple):
    """The arguments with which `permute_received_blocks` permutes received pages. See `permute_pages`."""

    remote_block_size: int  # tokens per remote block
    remote_layout: str


@dataclass(frozen=True, eq=False)
class PatternPlan:
    """The factored fragments that fill groups of pages on one local rank from remote ranks.

    `patterns` contains one group's fragments in factored form, and `fragments` lists them
    individually. A group consists of `local_pages_per_group` pages of this rank and
    `remote_pages_per_group` pages of each remote rank.
    """

    patterns: tuple[Pattern, ...]
    local_pages_per_group: int
    remote_pages_per_group: int

    @cached_property
    def remote_ranks(self) -> tuple[int, ...]:
        """The remote ranks that are read from, in ascending order."""
        return tuple(sorted({pattern.remote_rank for pattern in self.patterns}))

    @property
    def num_fragments(self) -> int:
        """Number of fragments per group, over all remote ranks."""
        return sum(pattern.num_fragments for pattern in self.patterns)

    @cached_property
    def fragments(self) -> GroupFragments:
        """All fragments of a group, one row per fragment."""
        return joined(GroupFragments, [expand_pattern(pattern) for pattern in self.patterns])

    def apply(
        self, local_pages: np.ndarray, remote_pages: Mapping[int, np.ndarray] | np.ndarray
    ) -> TransferRuns:
        """Return the byte runs that fill the given pages, with consecutive pages merged.

        The cost depends on the number of pages, not on the number of fragments. If a transport
        needs individual fragments, call `expand` on the runs. Entries for pages that the plan does not
        use may contain any number.

        Args:
            local_pages: int[groups, local_pages_per_group].
            remote_pages: int[groups, remote_pages_per_group] for each remote rank, as a mapping, or
                one array if all ranks use the same page numbers.

        Returns:
            The runs.

        Raises:
            TypeError: Pages are not integers.
            ValueError: A shape is wrong, a rank in `remote_ranks` is missing, a local page occurs
                twice, or a page number is below 1. Page 0 is the null block, which stands for
                tokens outside a sliding window and is never fetched.

        Example:
            >>> cache = CacheDescription(engine_id="a", num_layers=2, total_num_kv_heads=2, head_size=8,
            ...     block_size=4)
            >>> plan = plan_transfer(cache, cache, 0)
            >>> runs = plan.apply(np.array([[7], [8], [3]]), np.array([[1], [2], [9]]))
            >>> runs = runs.by_rank[0]  # page 3, and the merged pages 7 and 8, in two regions
            >>> runs.local_offset.tolist(), runs.remote_offset.tolist(), runs.length.tolist()
            ([768, 1792], [2304, 256], [256, 512])
            >>> runs.descriptors[:, [0, 2]].tolist()
            [[0, 0], [1, 1]]
        """
        local_used, remote_used = self._used
        local_ids = page_ids(local_pages, local_used, "local_pages")
        check_each_once(local_ids[:, local_used], "local_pages")
        remote_ids = remote_page_ids(remote_pages, remote_used, len(local_ids))
        if any(pattern.joins for pattern in self.patterns):
            first = local_ids[:, 0]
            if (first[1:] < first[:-1]).any():  # only adjacent entries can be merged
                order = np.argsort(first)
                local_ids = local_ids[order]
                remote_ids = {rank: ids[order] for rank, ids in remote_ids.items()}
        return TransferRuns(
            tuple(p.apply(local_ids, remote_ids[p.remote_rank]) for p in self.patterns)
        )

    @cached_property
    def _used(self) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Masks, bool[pages], of a group's written pages and of those read from each remote rank."""
        local = np.zeros(self.local_pages_per_group, bool)
        remote = {rank: np.zeros(self.remote_pages_per_group, bool) for rank in self.remote_ranks}
        for pattern in self.patterns:
            local[pattern.runs[:, 2]] = True
            remote[pattern.remote_rank][pattern.runs[:, 0]] = True
        return local, remote


@dataclass(frozen=True, eq=False)
class TransferPlan(PatternPlan):
    """A plan for filling groups of pages on one local rank from a remote engine. See `plan_transfer`.

    A *group* is the smallest number of pages that hold the same tokens on both sides: `tokens_per_group`
    tokens of a request, counted from its beginning, in `local_pages_per_group` pages of this rank and
    `remote_pages_per_group` pages of each remote rank. `patterns` contains one group's fragments in
    factored form, and `fragments` lists them individually. After the pages [groups,
    local_pages_per_group] have arrived, apply `permutation` to them with `permute_pages`, unless it
    is None.
    """

    local: CacheDescription
    remote: CacheDescription
    local_rank: int
    permutation: ReceivePermutation | None
    tokens_per_group: int
    # Patterns for incomplete groups of pages, which are not permuted.
    exact_patterns: tuple[Pattern, ...]


def plan_transfer(
    local: CacheDescription,
    remote: CacheDescription,
    local_rank: int,
    *,
    allow_permutation: bool = True,
) -> TransferPlan:
    """Plan how a local rank fills its pages with the same tokens from a remote engine.

    Parallel sizes, block size and memory order may differ. If several remote ranks hold a head,
    each local rank reads the head from one of them, and local ranks are distributed evenly over
    these replicas. The plan depends only on the arguments. Planning time does not depend on the
    number of blocks.

    Args:
        local: The local engine.
        remote: The remote engine.
        local_rank: The local rank.
        allow_permutation: Whether pages may arrive in the remote order of heads and tokens if this
            reduces the number of fragments. `permute_received_blocks` must then permute them. If
            False, every fragment is written to its final position.

    Returns:
        The plan.

    Raises:
        ValueError: The engines differ in `is_mla`, number of layers or heads, head sizes, dtype or
            scales; the least common multiple of their block sizes has more than 2**22 (token, head)
            pairs; or `local_rank` is out of range.

    Example:
        >>> from kvcache.layouts import backend
        >>> decode = CacheDescription(engine_id="d", num_layers=2, total_num_kv_heads=8, head_size=64,
        ...     block_size=64, tp_size=2, memory_order=backend("FLASH_ATTN").memory_order("HND"))
        >>> from dataclasses import replace
        >>> prefill = replace(decode, engine_id="p", tp_size=4, block_size=16)
        >>> plan = plan_transfer(decode, prefill, local_rank=1)
        >>> plan.permutation, plan.remote_ranks, plan.num_fragments  # 4 pages from 2 ranks, in 4 regions
        (ReceivePermutation(remote_block_size=16, remote_layout='HND'), (2, 3), 32)
        >>> plan_transfer(decode, prefill, 1, allow_permutation=False).num_fragments  # head by head
        64
    """
    instance(local, CacheDescription, "local")
    instance(remote, CacheDescription, "remote")
    allow_permutation = flag(allow_permutation, "allow_permutation")
    check_same_content(local, remote)
    integer(local_rank, "local_rank", 0, local.world_size - 1)
    tokens_per_group = lcm(local.tokens_per_page, remote.tokens_per_page)
    heads_per_rank = local.stage_of(local_rank).heads_per_rank
    if tokens_per_group * heads_per_rank > _MOST_HEADS:
        raise ValueError(
            f"local block_size is {local.block_size} (engine {local.engine_id!r}, "
            f"{local.tokens_per_page} tokens over its ranks), remote block_size is "
            f"{remote.block_size} (engine {remote.engine_id!r}, {remote.tokens_per_page}): expected "
            f"sizes whose least common multiple is below {tokens_per_group} tokens"
        )
    exact = find_patterns(local, remote, local_rank, received=False)
    patterns, permutation = exact, None
    if allow_permutation and _permutable(local, remote, local_rank):
        received = find_patterns(local, remote, local_rank, received=True)
        if _num_fragments(received) < _num_fragments(exact):
            patterns = received
            permutation = ReceivePermutation(remote.block_size, remote.layout)
    return TransferPlan(
        patterns,
        tokens_per_group // local.tokens_per_page,
        tokens_per_group // remote.tokens_per_page,
        local,
        remote,
        local_rank,
        permutation,
        tokens_per_group,
        exact,
    )


def check_same_content(
    local: CacheDescription, remote: CacheDescription, sides: tuple[str, str] = ("local", "remote")
) -> None:
    """Check that both engines store the same data per token.

    `sides`: names of the engines in error messages.
    """
    here, there = sides
    for name, description in zip(sides, (local, remote)):
        instance(description, CacheDescription, name)
    for name in _SAME:
        mine, theirs = getattr(local, name), getattr(remote, name)
        if mine != theirs:
            raise ValueError(
                f"{here} {name} is {mine!r} (engine {local.engine_id!r}), but "
                f"{there} {name} is {theirs!r} (engine {remote.engine_id!r}): expected equal values"
            )
    _check_scales(local, remote, sides)


def _check_scales(
    local: CacheDescription, remote: CacheDescription, sides: tuple[str, str]
) -> None:
    """Raise ValueError if the fp8 scales of the two engines differ."""
    shape = (local.num_layers, local.total_num_kv_heads)
    for name in ("k_scale", "v_scale"):
        mine, theirs = (
            np.broadcast_to(1.0 if scale is None else np.array(scale), shape)
            for scale in (getattr(local, name), getattr(remote, name))
        )
        if len(differing := np.argwhere(mine != theirs)):
            layer, head = differing[0]
            raise ValueError(
                f"{sides[0]} {name} of layer {layer}, head {head} is {mine[layer, head]} (engine "
                f"{local.engine_id!r}), but {sides[1]} {name} is {theirs[layer, head]} (engine "
                f"{remote.engine_id!r}): expected equal values"
            )


def _permutable(local: CacheDescription, remote: CacheDescription, local_rank: int) -> bool:
    """Return whether pages can be received whole: equal tokens, and sizes that divide."""
    same_tokens = local.cp_world_size == remote.cp_world_size and (
        local.cp_interleave == remote.cp_interleave or local.cp_world_size == 1
    )
    large = max(local.block_size, remote.block_size)
    divides = large % local.block_size == 0 and large % remote.block_size == 0
    differs = local.block_size != remote.block_size or local.layout != remote.layout
    mine = local.stage_of(local_rank)
    contiguous = mine.placement.is_contiguous and all(
        remote.stage_caches[pp_rank].placement.is_contiguous
        for pp_rank in shared_stages(remote, mine.layers)
    )
    return same_tokens and divides and differs and contiguous and mine.heads_per_rank > 1


def _num_fragments(patterns: tuple[Pattern, ...]) -> int:
    return sum(pattern.num_fragments for pattern in patterns)


def pages_with(
    cache: CacheDescription, cp_rank: int, tokens: tuple[int, int], num_pages: int
) -> np.ndarray:
    """Return the mask of a group's pages on a rank that hold any of the tokens [first, last)."""
    first, last = (_tokens_on_rank(cache, cp_rank, token) for token in tokens)
    begin = np.arange(num_pages) * cache.block_size
    return (begin < last) & (begin + cache.block_size > first) & (first < last)


def _tokens_on_rank(cache: CacheDescription, cp_rank: int, num_tokens: int) -> int:
    """Return how many of a request's first `num_tokens` tokens a context-parallel rank holds."""
    chunk = cache.cp_interleave
    whole, rest = divmod(num_tokens, chunk * cache.cp_world_size)
    return whole * chunk + min(max(rest - cp_rank * chunk, 0), chunk)
