# SPDX-License-Identifier: Apache-2.0
"""Loads an engine's blocks on one rank by reading from remote ranks."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcache.transfer import Transport
from kvcache_exchange.disaggregation.layout import GroupLayout, check_like
from kvcache_exchange.disaggregation.reading import Pending, Read, Reader, readers_of_sources
from kvcache_exchange.plugins.moves import CONVERTS, GroupPlan, Moves
from kvcache_exchange.transport.metadata import parse_metadata

_MOST_PEERS = 1024  # maximum number of peers whose metadata is cached


@dataclass(frozen=True)
class Plans:
    """The read plans of a local rank for one remote engine.

    `readers`: for each remote rank that this rank notifies, the number of readers that the remote
    rank waits for.
    """

    groups: tuple[GroupPlan, ...]
    readers: Mapping[int, int]

    @classmethod
    def of(
        cls, local: Sequence[GroupLayout], remote: Sequence[GroupLayout], local_rank: int
    ) -> Plans:
        """Create the plans. Raises ValueError if blocks cannot be converted between the two layouts."""
        check_like(local, remote, CONVERTS)
        return cls(
            tuple(GroupPlan(*pair, local_rank) for pair in zip(local, remote)),
            readers_of_sources(local, remote, local_rank),
        )


class RankReader(Reader):
    """State shared by all loads of a rank.

    `begins`: int64[m], ascending start addresses of the caches' allocations. `device`: the device
    of the caches.
    """

    def __init__(
        self,
        transport: Transport,
        layouts: Sequence[GroupLayout],
        addresses: Sequence[Sequence[int]],
        rank: int,
        begins: np.ndarray,
        device: torch.device,
    ) -> None:
        super().__init__(transport, device)
        self.layouts, self.addresses = tuple(layouts), addresses
        self.rank, self.begins = rank, begins
        self._plans: dict[tuple[GroupLayout, ...], Plans] = {}
        self._remote_begins: dict[str, np.ndarray] = {}

    def plans(self, remote: tuple[GroupLayout, ...]) -> Plans:
        """Return the plans for a remote engine. They are created on first use."""
        if remote not in self._plans:
            self._plans[remote] = Plans.of(self.layouts, remote, self.rank)
        return self._plans[remote]

    def remote_begins(self, metadata: str) -> np.ndarray:
        """Return the sorted start addresses of a peer's memory regions.

        Results are cached for recent peers.
        """
        if metadata not in self._remote_begins:
            while len(self._remote_begins) >= _MOST_PEERS:
                del self._remote_begins[next(iter(self._remote_begins))]
            decoded = base64.b64decode(metadata, validate=True)
            self._remote_begins[metadata], _ = parse_metadata(decoded, self.transport.name).bounds()
        return self._remote_begins[metadata]


class RequestFetch(Read):
    """A load of blocks that the sender has already computed."""

    _reader: RankReader

    def _plan(self) -> Mapping[int, int]:
        self._plans = self._reader.plans(self._load.offer.groups)
        return self._plans.readers

    def _begin(self) -> Iterator[Pending]:
        for source, *columns in self._moves():
            yield self._reader.transport.read(self._peers[source], *columns, timeout_s=self.left_s)

    def _moves(self) -> Iterator[Moves]:
        """Yield the reads of all groups.

        Each read stays within one local and one remote allocation.
        """
        offer = self._load.offer
        remote_ranks = range(len(offer.ranks))
        for group, plan in enumerate(self._plans.groups):
            local = list(self._load.blocks[group])
            known = self._load.first_token // plan.local.block_size
            local[:known] = [0] * min(known, len(local))
            remote_addresses = {rank: offer.ranks[rank].addresses[group] for rank in remote_ranks}
            borders = {
                rank: self._reader.remote_begins(offer.ranks[rank].metadata)
                for rank in plan.remote_ranks
            }
            for moves in plan.moves(
                self._reader.addresses[group],
                remote_addresses,
                local,
                offer.blocks[group],
                self._reader.begins,
                borders,
            ):
                yield from self._apart(moves)

    def _apart(self, moves: Moves) -> Iterator[Moves]:
        remote = self._load.offer.ranks[moves.remote_rank]
        remote_begins = self._reader.remote_begins(remote.metadata)
        local_begins = self._reader.begins
        pair = np.searchsorted(local_begins, moves.local, "right") * (len(remote_begins) + 1)
        pair = pair + np.searchsorted(remote_begins, moves.remote, "right")
        for each in np.unique(pair):
            yield Moves(moves.remote_rank, *(column[pair == each] for column in moves[1:]))
