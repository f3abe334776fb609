# SPDX-License-Identifier: Apache-2.0
"""The messages that an engine's scheduler and its ranks exchange."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.sources.disaggregation.layout import GroupLayout
from kvcache.sources.disaggregation.leases import Lease, Progress
from kvcache.sources.disaggregation.offer import Offer, RankAddress


@dataclass
class Load:
    """A load of the tokens [first_token, end_token) of an offer into blocks of a request, by group."""

    offer: Offer
    first_token: int
    end_token: int
    blocks: tuple[list[int], ...]


@dataclass
class Step:
    """The work of one step, by request.

    Attributes:
        loads: Loads that begin.
        leases: Leases that begin, with their duration in seconds and their progress.
        ends: Leases that end early.
        cancels: Loads that are canceled.
        unread: Offers that will not be read.
    """

    loads: dict[str, Load] = field(default_factory=dict)
    leases: dict[str, tuple[Lease, float, Progress]] = field(default_factory=dict)
    ends: set[str] = field(default_factory=set)
    cancels: set[str] = field(default_factory=set)
    unread: list[Offer] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the step has no work."""
        return not (self.loads or self.leases or self.ends or self.cancels or self.unread)


@dataclass
class Results:
    """A rank's results since the last call, by request.

    Attributes:
        sent: Leases that have ended.
        received: Loads that have arrived.
        failed: Reasons of failed loads, reported immediately.
        released: Failed loads to whose blocks the transport no longer writes.
        num_bytes: Number of bytes received.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    num_bytes: int = 0


@dataclass
class RankHandshake:
    """A rank's groups and address, sent once."""

    groups: tuple[GroupLayout, ...]
    address: RankAddress
