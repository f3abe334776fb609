# SPDX-License-Identifier: Apache-2.0
"""Cases for every call of `BlockPool`, for every call that concerns a request's tokens and hashes,
and for hashing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvcache import BlockPool, eviction_names, hash_blocks
from tests.machinery.out_of_memory.trial import Case, Trial


def _hashes(first: int, n: int) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.uint8)[:, None].repeat(32, 1)


class Pooled:
    """A pool with held blocks, cached free blocks, and pinned blocks."""

    def __init__(self, eviction: str) -> None:
        self.pool = pool = BlockPool(30, eviction=eviction)
        self.held = pool.allocate(6)
        self.free = pool.allocate(8)
        pool.publish(self.held[:4], _hashes(1, 4))
        pool.publish(self.free, _hashes(11, 8))
        pool.set_now(1.0)
        pool.notify_release(self.free, np.arange(4, 36, 4), num_prefix_tokens=8)
        pool.release(self.free[::-1].copy())
        pool.pin(self.free[:2])

    def state(self) -> Iterator[Callable[[], object]]:
        pool, every = self.pool, np.arange(1, 30)
        yield pool.check_invariants
        for count in ("num_free", "num_cached", "num_evicted", "num_pinned", "peak_used"):
            yield lambda c=count: getattr(pool, c)
        yield lambda: pool.ref_counts(every)
        yield lambda: [pool.is_pinned(i) for i in range(1, 30)]
        for group in (0, 3):
            yield lambda g=group: pool.lookup(_hashes(0, 60), g, prefix=False)
        for _ in range(20):  # reveals the eviction order
            yield lambda: pool.allocate(1)
        yield lambda: pool.ref_counts(every)
        yield pool.check_invariants

    def refusals(self) -> list[Callable[[], object]]:
        pool = self.pool
        return [
            pool.check_invariants,
            lambda: pool.allocate(1),
            lambda: pool.release(self.held[:1]),
            lambda: pool.retain(self.held[:1]),
            lambda: pool.publish(self.held[:0], _hashes(0, 0)),
            lambda: pool.lookup(_hashes(1, 1)),
            lambda: pool.evict([1]),
            lambda: pool.reset(),
            lambda: pool.num_free,
            lambda: pool.pin([]),
        ]


_CALLS: dict[str, Callable[[Pooled], object]] = {
    "allocate": lambda s: s.pool.allocate(3),
    "allocate, evicting": lambda s: s.pool.allocate(20),
    "retain": lambda s: s.pool.retain([*s.held[:2], *s.free[3:6]]),
    "release": lambda s: s.pool.release(s.held),
    "publish": lambda s: s.pool.publish(s.held[4:], _hashes(40, 2), 3, parent=b"p" * 32),
    "publish again": lambda s: s.pool.publish(s.held[4:], _hashes(1, 2)),
    "lookup": lambda s: s.pool.lookup(_hashes(1, 4)),
    "evict": lambda s: s.pool.evict([*s.held, *s.free]),
    "hit": lambda s: s.pool.hit(s.free[2:6]),
    "notify_release": lambda s: s.pool.notify_release(
        s.held[:4], np.arange(4, 20, 4), retention=[(0, 9, 70, 4.0)]
    ),
    "access": lambda s: s.pool.access(s.free[2:6], 3.0),
    "set_now": lambda s: s.pool.set_now(2.0),
    "pin": lambda s: s.pool.pin(s.free[1:6]),
    "unpin": lambda s: s.pool.unpin(s.free[:2]),
    "reset": lambda s: s.pool.reset(),
}


def _trial(eviction: str, call: Callable[[Pooled], object]) -> Trial:
    pooled = Pooled(eviction)
    return Trial(lambda: call(pooled), pooled.state, pooled.refusals())


def pool_cases() -> list[Case]:
    """Return the cases for each policy, and those for hashing, which has no object."""
    cases = [
        Case(f"BlockPool, {policy}: {name}", lambda p=policy, call=call: _trial(p, call))
        for policy in eviction_names()
        for name, call in _CALLS.items()
    ]
    hashing = Trial(lambda: hash_blocks(range(99), 4), lambda: iter(()), [])
    return [*cases, Case("hash_blocks", lambda: hashing)]
