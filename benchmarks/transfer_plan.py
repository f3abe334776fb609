# SPDX-License-Identifier: Apache-2.0
"""Measures planning and applying a transfer of 10,000 blocks of 80 layers between unequal engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.measure import Result, median_times
from kvcache.layouts import backend
from kvcache.transfer.description import CacheDescription
from kvcache.transfer.plan.transfer_plan import TransferPlan, plan_transfer

BLOCKS, PEER_GROUPS = 10_000, 4
BAR = 5  # ms
ORDER = backend("FLASH_ATTN").memory_order
BASE = CacheDescription(
    engine_id="a", num_layers=80, total_num_kv_heads=8, head_size=128, block_size=16
)


def fragment_by_fragment(
    plan: TransferPlan, local: list[list[int]], remote: dict[int, list[list[int]]]
) -> list[tuple[int, ...]]:
    """Run the baseline, which creates each descriptor of the plan in Python, as engines do."""
    fragments = list(zip(*(column.tolist() for column in plan.fragments)))
    local_stride, remote_stride = (
        cache.region_bytes.tolist() for cache in (plan.local, plan.remote)
    )
    found = []
    for group, pages in enumerate(local):
        for rank, theirs, source, at, mine, target, to, length in fragments:
            begin = remote[rank][group][theirs] * remote_stride[source] + at
            end = pages[mine] * local_stride[target] + to
            found.append((rank, source, begin, target, end, length))
    return found


def scattered(plan: TransferPlan) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Return scattered pages for 10,000 local blocks and for each remote rank.

    Because the pages are scattered, no fragments are merged.
    """
    rng = np.random.default_rng(0)
    groups = BLOCKS // plan.local_pages_per_group

    def ids(per_group: int) -> np.ndarray:
        return 1 + rng.permutation(groups * per_group * 2)[: groups * per_group].reshape(groups, -1)

    return (
        ids(plan.local_pages_per_group).astype(np.int32),
        {r: ids(plan.remote_pages_per_group).astype(np.int32) for r in plan.remote_ranks},
    )


def one_transfer(
    name: str, local: CacheDescription, remote: CacheDescription, allow_permutation: bool
) -> Iterator[Result]:
    def planned() -> TransferPlan:
        return plan_transfer(local, remote, 1, allow_permutation=allow_permutation)

    plan = planned()
    mine, theirs = scattered(plan)
    few = mine[:PEER_GROUPS], {rank: ids[:PEER_GROUPS] for rank, ids in theirs.items()}
    few_lists = few[0].tolist(), {rank: ids.tolist() for rank, ids in few[1].items()}
    ours = sorted(zip(*(column.tolist() for column in plan.apply(*few).expand())))
    peer = fragment_by_fragment(plan, *few_lists)
    # If some pages happen to be adjacent, the baseline creates more fragments than the plan.
    assert sum(f[-1] for f in ours) == sum(f[-1] for f in peer) and len(ours) <= len(peer)
    if len(ours) == len(peer):
        assert ours == sorted(peer)

    both, planning, loop = median_times(
        lambda: planned().apply(mine, theirs),
        planned,
        lambda: fragment_by_fragment(plan, *few_lists),
    )
    count = plan.apply(mine, theirs).num_fragments
    how = f"Python, per fragment; from {PEER_GROUPS * plan.local_pages_per_group} blocks"
    yield Result(
        f"plan + apply, {name}", "ms", both * 1e3, loop * 1e3 * len(mine) / PEER_GROUPS, how, BAR
    )
    name = f"planning alone, {name} ({count / 1e6:.1f} M fragments)"
    yield Result(name, "ms", planning * 1e3)


def all_results() -> Iterator[Result]:
    small = {"tp_size": 8, "block_size": 16}
    large = {"tp_size": 4, "block_size": 64}
    for heads in (8, 32):
        for (remote, local), layouts in (
            ((small, large), ("HND", "HND")),
            ((large, small), ("HND", "HND")),
            ((small, large), ("HND", "NHD")),
        ):
            theirs, mine = (
                replace(BASE, total_num_kv_heads=heads, memory_order=ORDER(layout), **sizes)
                for sizes, layout in zip((remote, local), layouts)
            )
            name = (
                f"{heads} heads, TP{theirs.tp_size} {layouts[0]} to TP{mine.tp_size} {layouts[1]}"
            )
            yield from one_transfer(name, mine, theirs, True)
            yield from one_transfer(f"{name}, exact", mine, theirs, False)
