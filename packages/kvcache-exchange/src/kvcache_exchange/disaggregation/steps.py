# SPDX-License-Identifier: Apache-2.0
"""The messages that an engine's scheduler and its ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcache.checks import shown
from kvcache_exchange.disaggregation.layout import GroupLayout
from kvcache_exchange.disaggregation.leases import Lease
from kvcache_exchange.disaggregation.offer import Offer, RankAddress


@dataclass
class Load:
    """A load of an offer's tokens [first_token, end_token) into a request's blocks, which are listed
    per group.
    """

    offer: Offer
    first_token: int
    end_token: int
    blocks: tuple[list[int], ...]


@dataclass
class Step:
    """The work of one step, keyed by request ID.

    Attributes:
        loads: Loads to begin.
        leases: Leases to begin, with their durations in seconds.
        ends: Requests whose leases end early.
        cancels: Requests whose loads are canceled.
        unread: Offers that will not be read.
    """

    loads: dict[str, Load] = field(default_factory=dict)
    leases: dict[str, tuple[Lease, float]] = field(default_factory=dict)
    ends: set[str] = field(default_factory=set)
    cancels: set[str] = field(default_factory=set)
    unread: list[Offer] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the step has no work."""
        return not (self.loads or self.leases or self.ends or self.cancels or self.unread)


@dataclass
class Results:
    """A rank's results since the last call, identified by request ID.

    Attributes:
        sent: Requests whose leases have ended.
        received: Requests whose loads have arrived.
        failed: Reason for each failed load, reported as soon as the load fails.
        released: Requests whose loads failed and whose blocks the transport no longer writes to.
        num_bytes: Number of bytes received.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    num_bytes: int = 0


@dataclass
class RankHandshake:
    """A rank's groups, address and index (None: unknown), which the rank sends once."""

    groups: tuple[GroupLayout, ...]
    address: RankAddress
    rank: int | None = None


def check_ranks(handshakes: Sequence[RankHandshake]) -> tuple[GroupLayout, ...]:
    """Check that all ranks of an engine have the same groups, and return the layouts.

    Raises:
        ValueError: A rank is missing or not in its place, or its layouts differ from those of the
            first rank.
    """
    layouts = handshakes[0].groups
    for i, handshake in enumerate(handshakes):
        if handshake.rank not in (None, i):
            raise ValueError(f"ranks[{i}] is rank {handshake.rank}: expected rank {i}")
        if len(handshake.groups) != len(layouts):
            raise ValueError(
                f"ranks[{i}] has {len(handshake.groups)} groups: expected {len(layouts)}, as in ranks[0]"
            )
        for g, (own, first) in enumerate(zip(handshake.groups, layouts)):
            one, other = (
                {**each, **each["description"]} for each in (own.to_dict(), first.to_dict())
            )
            for name in one | other:
                if name != "description" and one.get(name) != other.get(name):
                    raise ValueError(
                        f"ranks[{i}] has group {g} with {name} {shown(one.get(name))}: expected "
                        f"{shown(other.get(name))}, as in ranks[0]; plan all pipeline stages together, "
                        "with plan_cache(stages=)"
                    )
    for layout in layouts:
        if (size := layout.description.world_size) != len(handshakes):
            raise ValueError(
                f"there are {len(handshakes)} ranks: expected {size}, as in the layouts"
            )
    return layouts
