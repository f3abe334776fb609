"""What an engine's scheduler tells its ranks in a step, what they tell it, and how they are told of."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.disaggregation.layout import GroupLayout
from kvcache.disaggregation.leases import Lease, Progress
from kvcache.disaggregation.offer import Offer, RankAddress


@dataclass
class Load:
    """Read the tokens [first_token, end_token) of an offer into a request's own blocks, by group."""

    offer: Offer
    first_token: int
    end_token: int
    blocks: tuple[list[int], ...]


@dataclass
class Step:
    """Of a step, by request: loads that begin, leases that begin and those that end before their time,
    loads that are given up, and offers that nobody will read."""

    loads: dict[str, Load] = field(default_factory=dict)
    leases: dict[str, tuple[Lease, float, Progress]] = field(default_factory=dict)  # with seconds
    ends: set[str] = field(default_factory=set)
    cancels: set[str] = field(default_factory=set)
    unread: list[Offer] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to begin."""
        return not (self.loads or self.leases or self.ends or self.cancels or self.unread)


@dataclass
class Results:
    """Of a rank since the last call, by request: leases that are over; loads that have arrived; why loads
    failed, as soon as they have; loads to whose blocks the transport writes no more."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    num_bytes: int = 0


@dataclass
class RankHandshake:
    """Of a rank, once: its groups, and where it is read."""

    groups: tuple[GroupLayout, ...]
    address: RankAddress
