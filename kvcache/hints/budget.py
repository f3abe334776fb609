# SPDX-License-Identifier: Apache-2.0
"""Limits on hints, and bookkeeping of the blocks that hints currently use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvcache.checks import integer, number, shown

_SHARES = ("prefetch_share", "pin_share", "retain_share")
_SECONDS = ("ttl_s", "max_ttl_s", "timeout_s", "prefetch_timeout_s", "prefetch_ttl_s")


@dataclass(frozen=True, kw_only=True)
class HintBudget:
    """Limits on the part of a cache that hints may use. Shares are fractions of the device's
    blocks, from 0 to 1.

    Args:
        prefetch_share: Share of blocks that prefetches may fill and that no request has hit yet.
        pin_share: Share of blocks that pins may protect at a time.
        retain_share: Share of blocks that may have a priority at a time.
        ttl_s: Default duration of pins, priorities and offers, in seconds.
        max_ttl_s: Maximum duration that a hint is granted, in seconds.
        timeout_s: Seconds for which a demote or retain hint may wait for a step.
        prefetch_timeout_s: Seconds for which a prefetch or share hint may wait for free blocks and
            sources.
        prefetch_ttl_s: Seconds after which a prefetched prefix that no request has hit no longer
            counts against `prefetch_share`.
        max_pending: Maximum number of waiting hints.
        max_active: Maximum number of hints that hold blocks at a time.

    Raises:
        TypeError, ValueError: A limit is invalid.

    Example:
        >>> HintBudget(pin_share=0.1).pin_share
        0.1
    """

    prefetch_share: float = 0.25
    pin_share: float = 0.25
    retain_share: float = 0.25
    ttl_s: float = 60.0
    max_ttl_s: float = 600.0
    timeout_s: float = 2.0
    prefetch_timeout_s: float = 30.0
    prefetch_ttl_s: float = 60.0
    max_pending: int = 64
    max_active: int = 4

    def __post_init__(self) -> None:
        for name in _SHARES:
            if not 0 <= number(getattr(self, name), name, "a fraction from 0 to 1") <= 1:
                raise ValueError(
                    f"{name} is {shown(getattr(self, name))}: expected a fraction from 0 to 1"
                )
        for name in _SECONDS:
            if not 0 < number(getattr(self, name), name) < 2.0**31:
                raise ValueError(
                    f"{name} is {shown(getattr(self, name))}: expected seconds, more than 0"
                )
        if self.ttl_s > self.max_ttl_s:
            raise ValueError(
                f"ttl_s is {self.ttl_s} and max_ttl_s is {self.max_ttl_s}: expected ttl_s to be at most "
                "max_ttl_s"
            )
        integer(self.max_pending, "max_pending", least=1)
        integer(self.max_active, "max_active", least=1)

    def granted_s(self, ttl_s: float | None) -> float:
        """Return the duration in seconds that is granted to a hint with this `ttl_s`.

        Args:
            ttl_s: The duration in seconds that the hint requests. None: the default.

        Example:
            >>> HintBudget().granted_s(10_000)
            600.0
        """
        return self.ttl_s if ttl_s is None else min(ttl_s, self.max_ttl_s)


@dataclass(eq=False, slots=True)
class Spent:
    """Blocks of a budget share that a hint uses until a deadline. A hint that has not been carried
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
    """The blocks of a budget share that hints use, by key. An entry counts until its deadline."""

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
