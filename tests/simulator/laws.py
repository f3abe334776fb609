# SPDX-License-Identifier: Apache-2.0
"""Checks what bytes do not show: which blocks rows hold, what can be hit, and which pages plans list."""

from __future__ import annotations

from math import lcm

import numpy as np

from kvcache import Admit, KVCacheManager, Request, StepPlan
from kvcache.allocator import RequestState
from kvcache.kinds import KindProperties
from tests.simulator.row import Row, Wrong


class Laws:
    """The part of an engine that checks answers of the manager against their definitions."""

    manager: KVCacheManager
    kinds: list[KindProperties]
    rows: dict[int, Row]

    def blocks(self, each: Row) -> list[np.ndarray]:
        """Return the blocks of a row in each group, none if it is swapped out."""
        if self.manager.state(each.request) is RequestState.SWAPPED_OUT:
            return [np.zeros(0, np.int32) for _ in self.kinds]
        return [self.manager.block_ids(each.request, g) for g in range(len(self.kinds))]

    def is_everything_cached(self, each: Row) -> bool:
        request, options = each.request, self.manager.options
        return (
            options.enable_caching
            and options.retention_interval is None
            and not request.num_encoder_tokens
            and request.lora is None  # it may have been forgotten since the row was admitted
            and not self.manager.cache.is_stale(request)
        )

    def check_plan(self, plan: StepPlan, before: dict[Row, list[np.ndarray]]) -> None:
        """Check that a page is written once, that copies read none of these, and that pages that a
        row gets are filled, or are listed as fresh, or belong to its hit.
        """
        cleared = {*plan.zero.tolist(), *plan.fresh.tolist()}
        filled = [*plan.copy[:, 1].tolist(), *plan.swap_in[:, 1].tolist()]
        written = {*cleared, *filled}
        if len(written) < len(filled) + len(plan.zero) + len(plan.fresh):
            raise Wrong("a plan writes a page twice")
        for each in filter(None, map(self.rows.get, plan.append_rows.tolist())):
            if self.manager.state(each.request) is RequestState.SWAPPED_OUT:
                raise Wrong(f"a plan has blocks of {each.name}, which is on the host")
        if written & {*plan.copy[:, 0].tolist()}:
            raise Wrong("a plan copies from a page that it writes")
        for row, status, start in zip(*plan.answers.new[:3]):
            each = self.rows.get(int(row))
            if status == 0 and each is not None:
                before[each] = [
                    blocks[: -(-int(start) // size)]
                    for blocks, size in zip(self.blocks(each), self.manager.block_sizes)
                ]
        for each, old in before.items():
            if self.rows.get(each.row) is not each:
                continue
            for g, blocks in enumerate(self.blocks(each)):
                given = {*blocks.tolist()} - {*old[g].tolist()} - written - {0}
                if given and self.kinds[g].pages.is_transferable:
                    raise Wrong(f"pages {given} of {each.name} in group {g} are not fresh")

    def check_written(self, jobs: list[tuple[Row, int]]) -> None:
        """Check that rows write to no block that another row holds."""
        tables = {each: self.blocks(each) for each in self.rows.values()}
        for g, (kind, size) in enumerate(zip(self.kinds, self.manager.block_sizes)):
            if kind.pages.wraps or kind.pages.of_encoder or not kind.pages.has_slots:
                continue
            for each, start in jobs:
                end = self.manager.num_computed_tokens(each.request)
                own = {*tables[each][g][start // size : -(-end // size)].tolist()} - {0}
                for other, blocks in tables.items():
                    if other is not each and not own.isdisjoint(blocks[g].tolist()):
                        raise Wrong(f"{each.name} writes to a block of {other.name}")

    def check_held(self, each: Row, start: int) -> None:
        """Check that a row that computes from `start` holds no block that no token reads."""
        for g, (blocks, kind) in enumerate(zip(self.blocks(each), self.kinds)):
            if kind.pages.has_slots and not (kind.pages.wraps or kind.pages.of_encoder):
                first = kind.first_needed_token(start) // self.manager.block_sizes[g]
                if blocks[:first].any():
                    raise Wrong(f"{each.name} holds blocks of group {g} that no token reads")

    def check_published(self, each: Row, start: int) -> None:
        """Check that blocks that a step has filled from `start` can be found, in groups that keep all."""
        request, cache = each.request, self.manager.cache
        if not (request.write_cache and self.is_everything_cached(each)):
            return
        stop = min(self.manager.num_computed_tokens(request), request.num_tokens)
        hashes, unit = cache.hashes(request), cache.hash_block_size
        for g, (spec, kind) in enumerate(zip(self.manager.groups, self.kinds)):
            size = self.manager.block_sizes[g]
            is_whole = kind.pages.is_transferable and not kind.pages.of_encoder
            if spec.cached and is_whole and not kind.first_needed_token(10**6):
                wanted = hashes[size // unit - 1 :: size // unit][start // size : stop // size]
                if len(wanted) and not (cache.find(wanted, g).device > 0).all():
                    raise Wrong(f"full blocks of {each.name} in group {g} are not cached")

    def check_hit(self, request: Request) -> None:
        """Check that a hit of whole blocks is the longest for which all groups have what the next
        token reads.
        """
        manager, cache = self.manager, self.manager.cache
        pages = [kind.pages for kind in self.kinds]
        groups = [g for g, p in enumerate(pages) if p.is_transferable and not p.of_encoder]
        cached = [g for g in groups if manager.groups[g].cached]
        if request.mm_items or request.num_encoder_tokens or not request.read_cache or not cached:
            return
        hashes, unit, found = cache.hashes(request), cache.hash_block_size, {}
        for g in cached:
            per_block = manager.block_sizes[g] // unit
            wanted = hashes[per_block - 1 :: per_block]
            found[g] = cache.find(wanted, g).device > 0 if len(wanted) else np.zeros(0, bool)
        step = lcm(*(manager.block_sizes[g] for g in groups))
        longest = 0
        for n in range(step, request.num_tokens, step):
            for g in cached:
                size, end = manager.block_sizes[g], n // manager.block_sizes[g]
                first = n - 1 if not self.kinds[g].pages.has_slots else None
                first = self.kinds[g].first_needed_token(n) if first is None else first
                last = end + manager.groups[g].drafts
                if len(found[g]) < last or not found[g][first // size : last].all():
                    break
            else:
                longest = n
        hit = cache.find_prefix(request, whole_blocks=True).num_tokens
        if hit != longest and manager.options.enable_caching:
            raise Wrong(f"a hit of {request} has {hit} tokens: expected {longest}")

    def check_fit(self, ask: Admit, expected: int, status: int) -> None:
        if expected != status:
            raise Wrong(f"would_fit expects {expected} for {ask}, and the step answers {status}")
