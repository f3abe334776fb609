# SPDX-License-Identifier: Apache-2.0
"""The messages that an engine's scheduler and its ranks exchange."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.sources.disaggregation.layout import GroupLayout
from kvcache.sources.disaggregation.leases import Lease, Progress
from kvcache.sources.disaggregation.offer import Offer, RankAddress


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
        leases: Leases to begin, with their durations in seconds and their progress.
        ends: Requests whose leases end early.
        cancels: Requests whose loads are canceled.
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
