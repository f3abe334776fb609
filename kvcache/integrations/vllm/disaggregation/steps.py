"""What the scheduler's side tells the workers' in a step, and the other way once at the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvcache.integrations.vllm.disaggregation.layout import GroupLayout
from kvcache.integrations.vllm.disaggregation.offer import Lease, Offer, RankAddress


@dataclass
class Load:
    """Read the tokens [first_token, end_token) of an offer into a request's own blocks, by group."""

    offer: Offer
    first_token: int
    end_token: int
    blocks: tuple[list[int], ...]


@dataclass
class Step(KVConnectorMetadata):
    """Of a step: loads that begin, leases that begin, and offers that nobody will read, by request."""

    loads: dict[str, Load] = field(default_factory=dict)
    leases: dict[str, tuple[Lease, float]] = field(default_factory=dict)  # with seconds from now
    unread: list[Offer] = field(default_factory=list)


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """Of a worker, once: its groups, and where it is read."""

    groups: tuple[GroupLayout, ...]
    address: RankAddress
