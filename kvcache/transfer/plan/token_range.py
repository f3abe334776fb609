# SPDX-License-Identifier: Apache-2.0
"""Selects those runs of a plan that transfer an arbitrary range of a request's tokens.

Block tables may contain null pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvcache.checks import MAX_INT32, instance, integer, integers
from kvcache.transfer.plan.fragments import Pattern, TransferRuns, check_each_once, check_ranks
from kvcache.transfer.plan.transfer_plan import TransferPlan, pages_with


@dataclass(frozen=True, eq=False)
class RangeRuns:
    """The runs that transfer a range of tokens.

    Attributes:
        runs: The runs, in the form that `TransferPlan.apply` returns.
        permuted: int64[groups, local pages per group]. The local pages to pass to `permute_pages`
            once all runs have arrived.
        missing: int64[k]. The local pages in the range whose tokens are in no remote page.
    """

    runs: TransferRuns
    permuted: np.ndarray
    missing: np.ndarray


def plan_range(
    plan: TransferPlan,
    local_ids: np.ndarray,
    remote_ids: Mapping[int, np.ndarray] | np.ndarray,
    first_token: int,
    end_token: int,
) -> RangeRuns:
    """Return the runs that transfer a request's tokens [first_token, end_token) in one cache group.

    Page 0 is the null page, and entries beyond the end of a table count as null. Null pages on
    either side are skipped. Fragments are not split: all tokens that a local and a remote page have
    in common are transferred, including tokens outside the range. Pages may arrive in the remote
    order (`permuted`) only in complete groups.

    Args:
        plan: This rank's transfer plan.
        local_ids: int[n]. The request's block table on this rank. Entry i is the block for tokens
            from `i * tokens_per_page` onwards.
        remote_ids: int[n]. The peer's block table, as one array for all remote ranks or a mapping
            from remote rank to array.
        first_token: First token to transfer.
        end_token: End of the tokens to transfer, exclusive.

    Returns:
        The runs.

    Raises:
        TypeError: A table does not contain integers.
        ValueError: A shape or value is invalid, a rank is missing, a local page would be written
            twice, or the local table is too short for the tokens.

    Example:
        >>> from dataclasses import replace
        >>> from kvcache.transfer import CacheDescription, plan_transfer
        >>> small = CacheDescription(engine_id="a", num_layers=1, total_num_kv_heads=1, head_size=8,
        ...     block_size=16, memory_order=("block", "kv", "token", "head", "element"))
        >>> plan = plan_transfer(replace(small, block_size=64), small, 0)
        >>> found = plan_range(plan, np.array([0, 7]), np.array([0, 0, 0, 0, 0, 3, 4, 5]), 64, 128)
        >>> found.runs.num_fragments, found.runs.num_bytes, found.missing.tolist()  # tokens 80 to 127
        (6, 1536, [])
    """
    instance(plan, TransferPlan, "plan")
    end_token = integer(end_token, "end_token", 0)
    first_token = integer(first_token, "first_token", 0, end_token)
    tokens, per_page = plan.tokens_per_group, plan.local.tokens_per_page
    first_group, num_groups = first_token // tokens, -(-end_token // tokens)
    groups = num_groups - first_group if end_token > first_token else 0
    local = _table(local_ids, "local_ids")
    if len(local) * per_page < end_token:
        raise ValueError(
            f"end_token is {end_token}: expected at most {len(local) * per_page}, the number of "
            f"tokens in the {len(local)} pages of local_ids"
        )
    part = (first_group, groups)
    mine = _grouped(local, plan.local_pages_per_group, *part)
    theirs = {
        rank: _grouped(table, plan.remote_pages_per_group, *part)
        for rank, table in _remote_tables(remote_ids, plan.remote_ranks).items()
    }
    wanted = _Wanted(plan, first_token, end_token, *part)
    here = (mine > 0) & wanted.local
    check_each_once(mine[here], "local_ids")
    there = {rank: (ids > 0) & wanted.of_rank(rank) for rank, ids in theirs.items()}

    whole = np.zeros(groups, bool)
    if plan.permutation is not None and groups:
        whole = here.all(axis=1)
        for each in there.values():
            whole &= each.all(axis=1)
    found, filled = [], np.zeros(mine.shape, bool)
    filled[whole] = True
    for patterns, rows in ((plan.patterns, whole), (plan.exact_patterns, ~whole)):
        if not rows.any():
            continue
        for pattern in patterns:
            rank = pattern.remote_rank
            kept = _kept(pattern, here[rows], there[rank][rows])
            np.logical_or.at(
                filled, (np.flatnonzero(rows)[:, None], pattern.runs[None, :, 2]), kept
            )
            if kept.any():
                found.append(pattern.apply(mine[rows], theirs[rank][rows], kept))
    return RangeRuns(TransferRuns(tuple(found)), mine[whole], mine[here & ~filled])


def _kept(pattern: Pattern, here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Return the mask of runs whose pages are wanted on both sides, bool[groups, m]."""
    return here[:, pattern.runs[:, 2]] & there[:, pattern.runs[:, 0]]


class _Wanted:
    """Masks of the pages that hold any token in the range, bool[groups, pages]."""

    def __init__(
        self, plan: TransferPlan, first_token: int, end_token: int, first_group: int, groups: int
    ) -> None:
        self._plan, self._groups = plan, groups
        begin = first_group * plan.tokens_per_group
        self._first, self._end = first_token - begin, end_token - begin
        at = plan.local.coordinates(plan.local_rank)
        self.local = self._of(plan.local, at.cp_rank, plan.local_pages_per_group)

    def of_rank(self, rank: int) -> np.ndarray:
        """Return the mask of a remote rank's wanted pages."""
        remote = self._plan.remote
        cp_rank = remote.coordinates(rank).cp_rank
        return self._of(remote, cp_rank, self._plan.remote_pages_per_group)

    def _of(self, cache: object, cp_rank: int, per_group: int) -> np.ndarray:
        pages = np.ones((self._groups, per_group), bool)
        if not self._groups:
            return pages
        tokens, last = self._plan.tokens_per_group, self._groups - 1
        for group in {0, last}:  # the groups in between need all their pages
            low = max(self._first - group * tokens, 0)
            high = min(self._end - group * tokens, tokens)
            pages[group] = pages_with(cache, cp_rank, (low, high), per_group)
        return pages


def _table(ids: np.ndarray, name: str) -> np.ndarray:
    """Convert a block table to int64[n]. Raises TypeError or ValueError for other values."""
    given = integers(ids, name, ())
    if given.size and (given.min() < 0 or given.max() > MAX_INT32):
        raise ValueError(
            f"{name} holds {min(given.min(), 0) or given.max()}: expected page numbers, or 0"
        )
    return given


def _remote_tables(
    ids: Mapping[int, np.ndarray] | np.ndarray, ranks: tuple[int, ...]
) -> dict[int, np.ndarray]:
    if not isinstance(ids, Mapping):
        return dict.fromkeys(ranks, _table(ids, "remote_ids"))
    check_ranks(ids, ranks, "remote_ids")
    return {rank: _table(ids[rank], f"remote_ids[{rank}]") for rank in ranks}


def _grouped(table: np.ndarray, per_group: int, first_group: int, groups: int) -> np.ndarray:
    """Return a slice of a block table as int64[groups, per_group], padded with null pages."""
    found = np.zeros(groups * per_group, np.int64)
    part = table[first_group * per_group :][: len(found)]
    found[: len(part)] = part
    return found.reshape(groups, per_group)
