# SPDX-License-Identifier: Apache-2.0
"""Limits on hints, and bookkeeping of the blocks that hints currently use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SHARE = 0.25  # of a pool's blocks, for prefetches that no request has hit yet, and for pins
TTL_S = 60.0  # how long a pin lasts by default
MAX_TTL_S = 600.0  # how long a pin may last
PREFETCH_TIMEOUT_S = 30.0  # how long a prefetch may wait for free blocks and sources
PREFETCH_TTL_S = 60.0  # how long prefetched blocks count against the share
MAX_PENDING = 64  # hints that may wait at a time
MAX_ACTIVE = 4  # hints that may hold blocks at a time


@dataclass(eq=False, slots=True)
class Spent:
    """Blocks of a share that a hint uses until a deadline. A hint that has not been carried
    out yet reserves blocks without a deadline.

    - `hashes`: the prefix's hashes, in order.
    - `name`: the pin's session.
    """

    num_blocks: int
    deadline: float = math.inf
    hashes: tuple[bytes, ...] = ()
    num_tokens: int = 0
    name: str = ""


@dataclass(eq=False)
class Ledger:
    """The blocks of a share that hints use, by key. An entry counts until its deadline."""

    most: int
    entries: dict[object, Spent] = field(default_factory=dict)
    soonest: float = math.inf  # earliest time at which an entry may expire

    def add(self, key: object, spent: Spent) -> None:
        """Add an entry, or replace the entry with this key."""
        self.entries[key] = spent
        self.soonest = min(self.soonest, spent.deadline)

    def room(self, without: object = None) -> int:
        """Return how many more blocks may be used. The entry `without` is treated as removed."""
        used = sum(each.num_blocks for key, each in self.entries.items() if key != without)
        return max(self.most - used, 0)

    def pop_expired(self, now: float) -> list[Spent]:
        """Remove and return the entries whose deadline has passed."""
        if now < self.soonest:
            return []
        keys = [key for key, each in self.entries.items() if each.deadline <= now]
        expired = [self.entries.pop(key) for key in keys]
        self.soonest = min((each.deadline for each in self.entries.values()), default=math.inf)
        return expired
