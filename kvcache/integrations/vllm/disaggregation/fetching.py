"""One request's load on one rank: reads, the check of the lease, and word to the producer."""

from __future__ import annotations

import base64
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcache.integrations.vllm.disaggregation.layout import GroupLayout, check_like
from kvcache.integrations.vllm.disaggregation.leases import done_message, is_over
from kvcache.integrations.vllm.disaggregation.moves import GroupPlan, Moves
from kvcache.integrations.vllm.disaggregation.offer import Offer
from kvcache.integrations.vllm.disaggregation.steps import Load
from kvcache.transfer.plan.readers import source_readers
from kvcache.transfer.transport.base import Transfer, TransferError, Transport
from kvcache.transfer.transport.metadata import parse_metadata

_ERRORS = (TransferError, ConnectionError, OSError, ValueError, TypeError)

_MOST_PEERS = 1024  # whose metadata are kept


@dataclass(frozen=True)
class Plans:
    """How a local rank reads from one remote engine. readers: how many ranks each remote rank waits for,
    of those that this rank tells."""

    groups: tuple[GroupPlan, ...]
    readers: Mapping[int, int]

    @classmethod
    def of(
        cls, local: Sequence[GroupLayout], remote: Sequence[GroupLayout], local_rank: int
    ) -> Plans:
        """ValueError where blocks of the one cannot become blocks of the other."""
        check_like(local, remote)
        by_source: dict[int, set[int]] = {}
        for mine, theirs in zip(local, remote):
            for source, ranks in enumerate(source_readers(mine.description, theirs.description)):
                by_source.setdefault(source, set()).update(ranks)
        # A replica that no rank reads is told by rank 0.
        readers = {source: ranks or {0} for source, ranks in by_source.items()}
        return cls(
            tuple(GroupPlan(*pair, local_rank) for pair in zip(local, remote)),
            {source: len(ranks) for source, ranks in readers.items() if local_rank in ranks},
        )


class Rank:
    """What the loads of a rank share.

    inbox: int64[n], registered, where slots of leases are read to. begins: int64[m], where the
    allocations of the caches begin, ascending.
    """

    def __init__(
        self,
        transport: Transport,
        layouts: Sequence[GroupLayout],
        addresses: Sequence[Sequence[int]],
        rank: int,
        inbox: np.ndarray,
        begins: np.ndarray,
    ) -> None:
        self.transport, self.layouts, self.addresses = transport, tuple(layouts), addresses
        self.rank, self.inbox, self.begins = rank, inbox, begins
        self.free_cells = list(range(len(inbox)))
        self._plans: dict[tuple[GroupLayout, ...], Plans] = {}
        self._calls: dict[str, _Call] = {}
        self._remote_begins: dict[str, np.ndarray] = {}

    def plans(self, remote: tuple[GroupLayout, ...]) -> Plans:
        """The plans for an engine; made once."""
        if remote not in self._plans:
            self._plans[remote] = Plans.of(self.layouts, remote, self.rank)
        return self._plans[remote]

    def remote_begins(self, metadata: str) -> np.ndarray:
        """Where the memory of a peer begins, by region, sorted; read once of the newest peers."""
        if metadata not in self._remote_begins:
            while len(self._remote_begins) >= _MOST_PEERS:
                del self._remote_begins[next(iter(self._remote_begins))]
            decoded = base64.b64decode(metadata, validate=True)
            self._remote_begins[metadata], _ = parse_metadata(decoded, self.transport.name).bounds()
        return self._remote_begins[metadata]

    def connect(self, metadata: str, timeout_s: float) -> str | None:
        """The name of a peer; None while a thread connects to it, beside which other loads go on.

        ConnectionError or ValueError; one that was not reached is not tried again for as long as that
        took at most, so that its requests fail at once.
        """
        now = time.monotonic()
        self._calls = {known: call for known, call in self._calls.items() if call.until > now}
        call = self._calls.get(metadata)
        if call is None:
            call = self._calls[metadata] = _Call(self.transport, metadata, timeout_s)
        if call.is_alive():
            return None
        if not isinstance(call.error, ConnectionError):
            del self._calls[metadata]
        if call.error is not None:
            raise call.error
        return call.peer


class _Call(threading.Thread):
    """Connects to a peer. until: a time of `time.monotonic` to which its error is remembered."""

    def __init__(self, transport: Transport, metadata: str, timeout_s: float) -> None:
        super().__init__(name="kvcache call", daemon=True)
        self._transport, self._metadata, self._timeout_s = transport, metadata, timeout_s
        self.peer: str | None = None
        self.error: Exception | None = None
        self.until = math.inf
        self.start()

    def run(self) -> None:
        try:
            metadata = base64.b64decode(self._metadata, validate=True)
            self.peer = self._transport.connect(metadata, timeout_s=self._timeout_s)
        except Exception as error:  # raised where the load is
            self.error = error
        self.until = time.monotonic() + self._timeout_s


class Fetch:
    """A load under way: `step` is called until it returns True.

    Blocks first, then the slots of the lease: so what was read is right if the lease has not ended. A
    load that fails ends when the transport has let go of its blocks.
    """

    def __init__(self, rank: Rank, load: Load, timeout_s: float) -> None:
        self.error: str | None = None
        self._rank, self._load = rank, load
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._peers: dict[int, str] = {}
        self._cells: dict[int, int] = {}
        self._transfers: list[Transfer] = []
        self._stage: Any = self._connect

    @property
    def left_s(self) -> float:
        """Seconds to the deadline."""
        return self._deadline - time.monotonic()

    def step(self) -> bool:
        """Goes on without waiting; True once the load has ended, well or with `error`."""
        try:
            if self.error is None and self.left_s <= 0:
                raise TransferError(f"not done within {self._timeout_s:g} s")
            return self._stage()
        except Exception as error:  # whatever it is, the request is to be answered
            self.error = f"{error}" if isinstance(error, _ERRORS) else repr(error)
            for transfer in self._transfers:
                transfer.cancel(self.error)
            self._stage = self._let_go
            return self._stage()

    def _connect(self) -> bool:
        offer = self._load.offer
        plans = self._plans = self._rank.plans(offer.groups)
        if any(self._rank.transport.name != each.transport for each in offer.ranks):
            raise ValueError(
                f"transport is {self._rank.transport.name!r} here, {offer.ranks[0].transport!r} in "
                f"engine {offer.engine_id!r}: set the same in both"
            )
        for source in plans.readers:
            if source not in self._peers:
                metadata = offer.ranks[source].metadata
                peer = self._rank.connect(metadata, max(self.left_s, 0.001))
                if peer is not None:
                    self._peers[source] = peer
        if len(self._peers) < len(plans.readers):
            return False
        for source, *columns in self._moves(offer):
            read = self._rank.transport.read(
                self._peers[source], *columns, timeout_s=max(self.left_s, 0.001)
            )
            self._transfers.append(read)
        self._stage = self._wait_for_blocks
        return False

    def _moves(self, offer: Offer) -> Iterator[Moves]:
        """The reads of all groups, each between one allocation here and one there."""
        remote_ranks = range(len(offer.ranks))
        for group, plan in enumerate(self._plans.groups):
            local = list(self._load.blocks[group])
            known = self._load.first_token // plan.local.block_size
            local[:known] = [0] * min(known, len(local))
            remote_addresses = {rank: offer.ranks[rank].addresses[group] for rank in remote_ranks}
            for moves in plan.moves(
                self._rank.addresses[group], remote_addresses, local, offer.blocks[group]
            ):
                yield from self._apart(moves)

    def _apart(self, moves: Moves) -> Iterator[Moves]:
        remote_begins = self._rank.remote_begins(self._load.offer.ranks[moves.remote_rank].metadata)
        local_begins = self._rank.begins
        pair = np.searchsorted(local_begins, moves.local, "right") * (len(remote_begins) + 1)
        pair = pair + np.searchsorted(remote_begins, moves.remote, "right")
        for each in np.unique(pair):
            yield Moves(moves.remote_rank, *(column[pair == each] for column in moves[1:]))

    def _wait_for_blocks(self) -> bool:
        if all(transfer.poll() for transfer in self._transfers):
            if len(self._rank.free_cells) < len(self._peers):
                raise ValueError("too many loads at once: expected fewer")
            self._cells = {source: self._rank.free_cells.pop() for source in self._peers}
            self._stage = self._read_slots
        return False

    def _read_slots(self) -> bool:
        lease, inbox = self._load.offer.lease, self._rank.inbox
        self._transfers = []
        for source, cell in self._cells.items():
            address = np.array([inbox.ctypes.data + 8 * cell])
            slot = np.array([self._load.offer.ranks[source].leases + 8 * lease.slot])
            read = self._rank.transport.read(
                self._peers[source],
                address,
                slot,
                np.array([8]),
                timeout_s=max(self.left_s, 0.001),
            )
            self._transfers.append(read)
        self._stage = self._wait_for_slots
        return False

    def _wait_for_slots(self) -> bool:
        if not all(transfer.poll() for transfer in self._transfers):
            return False
        lease = self._load.offer.lease
        states = {
            is_over(int(self._rank.inbox[cell]), lease.generation) for cell in self._cells.values()
        }
        if True in states:
            raise TransferError(
                f"the lease of request {self._load.offer.request_id} is over: set a longer lease_s in "
                f"engine {self._load.offer.engine_id!r}"
            )
        if None in states:  # told before the producer's workers knew of it
            self._stage = self._read_slots
            return False
        self._tell()
        return self._end()

    def _let_go(self) -> bool:
        """Of a load that failed: True once the transport no longer writes to its blocks."""
        if not all(transfer.is_released for transfer in self._transfers):
            return False
        self._tell()
        return self._end()

    def _tell(self) -> None:
        """Tells the producer's ranks that this one reads no more; a peer that is gone needs no word."""
        offer = self._load.offer
        for source, peer in self._peers.items():
            count = self._plans.readers[source]
            try:
                message = done_message(offer.request_id, offer.lease.generation, count)
                self._rank.transport.send(peer, message)
            except _ERRORS:
                continue

    def _end(self) -> bool:
        self._rank.free_cells += self._cells.values()
        self._cells = {}
        return True
