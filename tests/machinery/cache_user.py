# SPDX-License-Identifier: Apache-2.0
"""Makes random calls, as a scheduler would, to a manager with events and a host tier."""

from __future__ import annotations

import random

import numpy as np

from kvcache import GroupSpec, KVCacheManager, Request, StepReport, hash_blocks
from kvcache.allocator.hashing import DEFAULT_SEED, hash_seed
from kvcache_exchange.router_events.wire import wire_hash

GROUPS = [GroupSpec("full_attention", 8), GroupSpec("sliding_window", 4, {"window": 12})]


class CacheUser:
    """A manager and random requests that share a few prefixes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.manager = KVCacheManager.for_groups(
            GROUPS,
            rng.randint(20, 60),
            200,
            enable_events=True,
            num_host_blocks=rng.randint(10, 60),
            host_write=rng.choice(["back", "through"]),
            num_preallocate_tokens=0,
        )
        self._requests: list[Request] = []
        self._count = 0
        self.digests = {wire_hash(hash_seed(DEFAULT_SEED, "seed")): hash_seed(DEFAULT_SEED, "seed")}

    def work(self) -> None:
        """Perform one random operation."""
        chosen = self._rng.choices(
            (self._admit, self._go_on, self._leave, self._reset, self._new_weights, self._evict),
            (40, 20, 30, 2, 1, 5),
        )
        chosen[0]()

    def _step(self, *args, **options) -> np.ndarray:
        plan = self.manager.step(*args, **options)
        self.manager.report(StepReport(plan.step_id, completed=True))
        return plan.rows

    def _admit(self) -> None:
        prefix = self._rng.randint(0, 4) * 1000
        length = self._rng.randint(1, 90)
        self._count += 1
        tokens = [*range(prefix, prefix + self._rng.randint(0, length))]
        tokens += [self._rng.randint(0, 3) for _ in range(length - len(tokens))]
        request = Request(f"r{self._count}", tokens)
        if self._step(new=[request])[0] >= 0:
            self._requests.append(request)
            self.digests |= {
                wire_hash(each.tobytes()): each.tobytes()
                for each in self.manager.cache.hashes(request)
            }

    def _go_on(self) -> None:
        if not self._requests:
            return
        request = self._rng.choice(self._requests)
        if request.num_tokens < 190:
            self._step([self.manager.row(request)], [1], token_ids=[self._rng.randint(0, 3)])
            self.digests |= {
                wire_hash(each.tobytes()): each.tobytes()
                for each in self.manager.cache.hashes(request)
            }

    def _leave(self) -> None:
        if self._requests:
            place = self._rng.randrange(len(self._requests))
            self.manager.free(self._requests.pop(place))

    def _reset(self) -> None:
        while self._requests:
            self._leave()
        assert self.manager.cache.reset()

    def _new_weights(self) -> None:
        self.manager.cache.start_epoch()
        while self._requests:
            self._leave()

    def _evict(self) -> None:
        block = self._rng.randrange(1, self.manager.pool.num_blocks)
        self.manager.cache.evict([block])

    def cached(self) -> set[tuple[str, int, int]]:
        """Return (medium, group, wire hash) of each cached block according to the pools."""
        return cached(self.manager)

    def check_content(self, view) -> None:
        """Check that each block's hash follows from the parent and the tokens recorded in the view."""
        root = hash_seed(DEFAULT_SEED, "seed")
        for medium, group in view.places:
            for each in view.hashes(medium, group):
                block = view.block(each, medium, group)
                assert len(block.token_ids) == block.block_size == GROUPS[group].block_size
                parent = root if block.parent is None else self.digests[block.parent]
                hashes = hash_blocks(
                    block.token_ids, self.manager.cache.hash_block_size, parent=parent
                )
                assert wire_hash(hashes[-1].tobytes()) == each


def cached(manager: KVCacheManager) -> set[tuple[str, int, int]]:
    """Return (medium, group, wire hash) of each cached block according to the pools."""
    found = set()
    pools = {"gpu": manager.pool, "cpu": manager.host_pool}
    for medium, pool in pools.items():
        if pool is None:
            continue
        known = manager.cache.hashes_of(np.arange(1, pool.num_blocks), medium)
        found |= {
            (medium.upper(), int(group), wire_hash(each.tobytes()))
            for each, group in zip(known.hashes, known.groups)
            if group >= 0
        }
    return found


def shown(view) -> set[tuple[str, int, int]]:
    """Return (medium, group, wire hash) of each block in a reader's view."""
    return {(*place, each) for place in view.places for each in view.hashes(*place)}
