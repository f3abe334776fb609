"""The transfer plan of a local rank: which bytes of which remote rank's pages fill its pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
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

_MOST_HEADS = 1 << 22  # heads of all tokens in a group; planning looks at each once
# Fields that must be equal in both engines. The first difference is reported.
_SAME = (
    "is_mla",
    "num_layers",
    "total_num_kv_heads",
    "head_size",
    "v_head_size",
    "dtype",
    "scale_bytes_per_head",
)


class ReceivePermutation(NamedTuple):
    """Arguments of `permute_received_blocks` for pages that have arrived; see `permute_pages`."""

    remote_block_size: int  # tokens
    remote_layout: str


@dataclass(frozen=True, eq=False)
class PatternPlan:
    """The fragments that fill groups of pages of one local rank from remote ranks, factored.

    `patterns` are the fragments of one group, `fragments` lists them. A group is
    `local_pages_per_group` pages of this rank and `remote_pages_per_group` pages of each remote rank.
    """

    patterns: tuple[Pattern, ...]
    local_pages_per_group: int
    remote_pages_per_group: int

    @cached_property
    def remote_ranks(self) -> tuple[int, ...]:
        """The remote ranks that are read, in ascending order."""
        return tuple(sorted({pattern.remote_rank for pattern in self.patterns}))

    @property
    def num_fragments(self) -> int:
        """The number of fragments of a group, of all remote ranks."""
        return sum(pattern.num_fragments for pattern in self.patterns)

    @property
    def bytes_per_group(self) -> dict[int, int]:
        """The bytes of a group by remote rank."""
        count = Counter()
        for pattern in self.patterns:
            count[pattern.remote_rank] += pattern.num_bytes
        return dict(sorted(count.items()))

    @property
    def is_whole_pages(self) -> bool:
        """Whether each fragment is all bytes of a page in a region, on both sides.

        Then a run of consecutive pages is one fragment, however long.
        """
        return all(pattern.is_whole_pages for pattern in self.patterns)

    @cached_property
    def fragments(self) -> GroupFragments:
        """One row per fragment of a group."""
        return joined(GroupFragments, [expand_pattern(pattern) for pattern in self.patterns])

    def apply(
        self, local_pages: np.ndarray, remote_pages: Mapping[int, np.ndarray] | np.ndarray
    ) -> TransferRuns:
        """The runs of bytes for given pages; those of consecutive pages are merged.

        local_pages: int[groups, local_pages_per_group]; remote_pages: by remote rank
        int[groups, remote_pages_per_group], or one array where all ranks use the same numbers. Pages
        that a partial plan leaves out may have any number. The cost grows with the pages, not with the
        fragments; `expand` lists fragments, for a transport that needs them.

        TypeError or ValueError for other shapes, a missing rank of `remote_ranks`, pages below 1 (0 is
        the null block: tokens behind a sliding window are not fetched), and a local page that is named
        twice.

        >>> cache = CacheDescription(engine_id="a", num_layers=2, total_num_kv_heads=2, head_size=8,
        ...     block_size=4)
        >>> plan = plan_transfer(cache, cache, 0)
        >>> runs = plan.apply(np.array([[7], [8], [3]]), np.array([[1], [2], [9]]))
        >>> runs = runs.by_rank[0]  # pages 3, and 7 and 8 together, in each of four regions
        >>> runs.local_offset.tolist(), runs.remote_offset.tolist(), runs.length.tolist()
        ([384, 896], [1152, 128], [128, 256])
        >>> runs.descriptors[:, [0, 2]].tolist()
        [[0, 0], [1, 1], [2, 2], [3, 3]]
        """
        local_used, remote_used = self._used
        local_ids = page_ids(local_pages, local_used, "local_pages")
        check_each_once(local_ids[:, local_used], "local_pages")
        remote_ids = remote_page_ids(remote_pages, remote_used, len(local_ids))
        if any(pattern.joins for pattern in self.patterns):
            first = local_ids[:, 0]
            if (first[1:] < first[:-1]).any():  # only neighbours in the list are merged
                order = np.argsort(first)
                local_ids = local_ids[order]
                remote_ids = {rank: ids[order] for rank, ids in remote_ids.items()}
        return TransferRuns(
            tuple(p.apply(local_ids, remote_ids[p.remote_rank]) for p in self.patterns)
        )

    @cached_property
    def _used(self) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Which pages of a group are written, and by remote rank which are read: bool[pages]."""
        local = np.zeros(self.local_pages_per_group, bool)
        remote = {rank: np.zeros(self.remote_pages_per_group, bool) for rank in self.remote_ranks}
        for pattern in self.patterns:
            local[pattern.runs[:, 2]] = True
            remote[pattern.remote_rank][pattern.runs[:, 0]] = True
        return local, remote


@dataclass(frozen=True, eq=False)
class TransferPlan(PatternPlan):
    """How one local rank fills groups of pages from a remote engine; made by `plan_transfer`.

    A *group* is the smallest number of pages on both sides that hold the same tokens:
    `tokens_per_group` tokens of a request, counted from its beginning, in `local_pages_per_group` pages
    of this rank and `remote_pages_per_group` pages of each remote rank. `patterns` are the fragments of
    one group, factored; `fragments` lists them. `permutation`: to be applied (`permute_pages`) to the
    pages `[groups, local_pages_per_group]` once they have arrived; None where none is needed.
    """

    local: CacheDescription
    remote: CacheDescription
    local_rank: int
    permutation: ReceivePermutation | None
    tokens_per_group: int
    # Patterns without a permutation, for groups of which only some pages exist.
    exact_patterns: tuple[Pattern, ...]
    is_partial: bool = False  # made by `for_tokens`

    def for_tokens(self, num_tokens: int, *, first_token: int = 0) -> TransferPlan:
        """The plan for a group of which only some tokens are needed: a request's last group, or first.

        The group's first `num_tokens` tokens exist; those before `first_token`, a multiple of the
        local `tokens_per_page`, are already local (a prefix hit). Fragments are not cut; those of pages
        without a needed token on either side are left out, and such pages may be given any number.
        `tokens_per_group` and the pages per group become those that exist. ValueError for tokens that
        a group does not have.

        >>> small = CacheDescription(engine_id="a", num_layers=1, total_num_kv_heads=1, head_size=8,
        ...     block_size=4)
        >>> plan = plan_transfer(replace(small, block_size=16), small, 0).for_tokens(9)
        >>> plan.local_pages_per_group, plan.remote_pages_per_group, plan.fragments.remote_page.tolist()
        (1, 3, [0, 1, 2, 0, 1, 2])
        """
        if self.is_partial:
            raise ValueError("the plan is of some tokens already: expected that of whole groups")
        num_tokens = integer(num_tokens, "num_tokens", 1, self.tokens_per_group)
        first_token = integer(first_token, "first_token", 0, num_tokens - 1)
        if first_token % self.local.tokens_per_page:
            raise ValueError(
                f"first_token is {first_token}: expected a multiple of the "
                f"{self.local.tokens_per_page} tokens of a local page"
            )
        wanted = (first_token, num_tokens)
        cp_rank = self.local.coordinates(self.local_rank).cp_rank
        mine = pages_with(self.local, cp_rank, wanted, self.local_pages_per_group)
        # The permutation needs all local pages that a remote page fills.
        permutes = self.permutation is not None and bool(mine.all())

        def kept(patterns: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
            found = []
            for pattern in patterns:
                cp_rank = self.remote.coordinates(pattern.remote_rank).cp_rank
                theirs = pages_with(self.remote, cp_rank, wanted, self.remote_pages_per_group)
                has_tokens = mine[pattern.runs[:, 2]] & theirs[pattern.runs[:, 0]]
                if has_tokens.any():
                    found.append(replace(pattern, runs=pattern.runs[has_tokens]))
            return tuple(found)

        exact = kept(self.exact_patterns)
        return replace(
            self,
            patterns=kept(self.patterns) if permutes else exact,
            permutation=self.permutation if permutes else None,
            tokens_per_group=num_tokens,
            local_pages_per_group=-(-num_tokens // self.local.tokens_per_page),
            remote_pages_per_group=-(-num_tokens // self.remote.tokens_per_page),
            exact_patterns=exact,
            is_partial=True,
        )


def plan_transfer(
    local: CacheDescription,
    remote: CacheDescription,
    local_rank: int,
    *,
    allow_permutation: bool = True,
) -> TransferPlan:
    """The plan by which a local rank fills its pages with the same tokens of a remote engine.

    Parallel sizes, block size and memory order may differ. Where several remote ranks hold a head, it is
    read from one of them, and local ranks are spread over them. `allow_permutation`: where that makes
    fewer fragments, pages arrive in the remote order of heads and tokens and are then permuted by
    `permute_received_blocks`; else every fragment goes to its final position.

    ValueError where `is_mla`, layers, heads, head sizes, dtype or scales differ, for block sizes whose
    least common multiple is millions of tokens, and for a rank out of range. The plan depends only on
    the arguments, and the time does not depend on the number of blocks.

    >>> from kvcache.layouts import backend
    >>> decode = CacheDescription(engine_id="d", num_layers=2, total_num_kv_heads=8, head_size=64,
    ...     block_size=64, tp_size=2, memory_order=backend("FLASH_ATTN").memory_order("HND"))
    >>> prefill = replace(decode, engine_id="p", tp_size=4, block_size=16)
    >>> plan = plan_transfer(decode, prefill, local_rank=1)
    >>> plan.permutation, plan.remote_ranks, plan.num_fragments  # 4 pages of 2 ranks, 4 regions
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
            f"sizes that meet sooner than after {tokens_per_group} tokens"
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
    """TypeError or ValueError unless both engines hold the same of a token. sides: how to call them."""
    here, there = sides
    for name, description in zip(sides, (local, remote)):
        instance(description, CacheDescription, name)
    for name in _SAME:
        mine, theirs = getattr(local, name), getattr(remote, name)
        if mine != theirs:
            raise ValueError(
                f"{here} {name} is {mine!r} (engine {local.engine_id!r}), "
                f"{there} {name} is {theirs!r} (engine {remote.engine_id!r}): expected the same"
            )
    _check_scales(local, remote, sides)


def _check_scales(
    local: CacheDescription, remote: CacheDescription, sides: tuple[str, str]
) -> None:
    """ValueError where fp8 values of the two engines have different scales."""
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
                f"{local.engine_id!r}), {sides[1]} {name} is {theirs[layer, head]} (engine "
                f"{remote.engine_id!r}): expected the same"
            )


def _permutable(local: CacheDescription, remote: CacheDescription, local_rank: int) -> bool:
    """Whether remote pages can arrive whole: ranks hold the same tokens, one block size divides the
    other."""
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
    """bool[num_pages]: which of a rank's pages of a group hold any of the tokens [first, last)."""
    first, last = (_tokens_on_rank(cache, cp_rank, token) for token in tokens)
    begin = np.arange(num_pages) * cache.block_size
    return (begin < last) & (begin + cache.block_size > first) & (first < last)


def _tokens_on_rank(cache: CacheDescription, cp_rank: int, num_tokens: int) -> int:
    """How many of a request's first `num_tokens` tokens a context-parallel rank holds."""
    chunk = cache.cp_interleave
    whole, rest = divmod(num_tokens, chunk * cache.cp_world_size)
    return whole * chunk + min(max(rest - cp_rank * chunk, 0), chunk)
