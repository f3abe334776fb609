# SPDX-License-Identifier: Apache-2.0
"""The load of one request on one rank.

A load reads the blocks, checks the lease, and notifies the sender.
"""

from __future__ import annotations

import base64
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch

from kvcache.transfer import TransferError, Transport, source_readers
from kvcache.worker.swap.streams import Event, streams_of
from kvcache_exchange.disaggregation.layout import GroupLayout
from kvcache_exchange.disaggregation.leases import SLOT_BYTES, done_message, is_lease_over
from kvcache_exchange.disaggregation.steps import Load
from kvcache_exchange.transport.metadata import Metadata, parse_metadata

_ERRORS = (TransferError, ConnectionError, OSError, ValueError, TypeError)
_NUM_CELLS = 4096  # number of lease slots that can be read concurrently
_AGAIN_S = 0.002  # interval in seconds at which to check whether a lease has begun


class Pending(Protocol):
    """Reads in flight: one transfer, or several transfers that are handled as one."""

    num_bytes: int

    def poll(self) -> bool: ...

    def cancel(self, reason: str) -> None: ...

    @property
    def is_released(self) -> bool: ...


class Reader:
    """The state shared by a rank's loads: the transport, copy streams, and the cells into which
    lease slots are read.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport, self.streams = transport, streams_of(device)
        self.inbox = np.zeros(_NUM_CELLS, np.int64)
        self.free_cells = list(range(_NUM_CELLS))
        transport.register([(self.inbox.ctypes.data, self.inbox.nbytes)])
        self._calls: dict[str, _Call] = {}
        # For each agent, its incarnation and the generation of its latest known lease.
        self._latest: dict[str, tuple[str, int]] = {}
        self._lock = threading.Lock()

    def connect(self, metadata: str, timeout_s: float, generation: int = 0) -> str | None:
        """Return a peer's name, or None while a thread is connecting to it. Other loads continue in
        the meantime.

        For `timeout_s` after a failure, the same ConnectionError is raised without another attempt.
        `generation` is the generation of the offer's lease. A restarted agent issues later
        generations. When one is seen, the earlier incarnation of the agent, which may be hanging
        and still occupy the name, is disconnected, and loads from it fail.

        Raises:
            ConnectionError: The peer could not be reached.
            ValueError: The metadata is invalid.
        """
        now = time.monotonic()
        self._calls = {known: call for known, call in self._calls.items() if call.until > now}
        call = self._calls.get(metadata)
        if call is None:
            call = self._calls[metadata] = _Call(self, metadata, timeout_s, generation)
        if call.is_alive():
            return None
        if not isinstance(call.error, ConnectionError):
            del self._calls[metadata]
        if call.error is not None:
            raise call.error
        return call.peer

    def call(self, metadata: bytes, timeout_s: float, generation: int) -> str:
        """Connect to a peer and wait for the result. Runs in the thread that `connect` starts."""
        self.streams.enter()
        theirs = parse_metadata(metadata, self.transport.name)
        try:
            peer = self.transport.connect(metadata, timeout_s=timeout_s)
        except ValueError:
            if not self._make_way(theirs, generation):
                raise
            peer = self.transport.connect(metadata, timeout_s=timeout_s)
        with self._lock:
            incarnation, latest = self._latest.get(peer, ("", 0))
            if incarnation != theirs.incarnation or generation > latest:
                self._latest[peer] = theirs.incarnation, generation
        return peer

    def _make_way(self, theirs: Metadata, generation: int) -> bool:
        """Disconnect an earlier incarnation of a peer. Returns False if none is known."""
        with self._lock:
            known = self._latest.get(theirs.agent)
            if known is None:
                return False
            if known[0] == theirs.incarnation:  # another thread has disconnected the earlier one
                return True
            if generation <= known[1]:
                return False
            self._latest[theirs.agent] = theirs.incarnation, generation
            with suppress(ValueError):  # the connection has already ended
                self.transport.disconnect(theirs.agent)
        return True


class _Call(threading.Thread):
    """A thread that connects to a peer.

    An error is kept until the time `until`, as measured by `time.monotonic`.
    """

    def __init__(self, reader: Reader, metadata: str, timeout_s: float, generation: int) -> None:
        super().__init__(name="kvcache call", daemon=True)
        self._reader, self._metadata, self._timeout_s = reader, metadata, timeout_s
        self._generation = generation
        self.peer: str | None = None
        self.error: Exception | None = None
        self.until = math.inf
        self.start()

    def run(self) -> None:
        try:
            metadata = base64.b64decode(self._metadata, validate=True)
            self.peer = self._reader.call(metadata, self._timeout_s, self._generation)
        except Exception as error:  # raised by `connect`
            self.error = error
        self.until = time.monotonic() + self._timeout_s


class Read(ABC):
    """A load in flight. Call `step` repeatedly until it returns True.

    The lease slots are read after the blocks. If the lease has not ended by then, the blocks are
    valid. A failed load ends once the transport has released its blocks.
    """

    def __init__(self, reader: Reader, load: Load, timeout_s: float) -> None:
        self.error: str | None = None
        self.num_bytes = 0
        self._reader, self._load, self.offer = reader, load, load.offer
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._after: Event | None = None
        self._peers: dict[int, str] = {}
        self._cells: dict[int, int] = {}
        self._reads: list[Pending] = []
        self._readers: Mapping[int, int] = {}
        self.is_told = False  # whether all sender's ranks were notified that the load has ended
        self._next_look = 0.0
        self._stage: Any = self._connect

    @abstractmethod
    def _plan(self) -> Mapping[int, int]:
        """Return, for each remote rank to read or notify, the number of local ranks that it waits
        for. Raises ValueError.
        """

    @abstractmethod
    def _begin(self) -> Iterable[Pending]:
        """Begin the reads. Raises ValueError or TransferError."""

    @property
    def left_s(self) -> float:
        """Return the number of seconds until the deadline, but at least one millisecond."""
        return max(self._deadline - time.monotonic(), 0.001)

    def count_from(self, seconds: float, after: Event | None = None) -> None:
        """Start the timeout at the time at which the load was requested, as measured by
        `time.monotonic`.

        Blocks are written only after the event `after`, because work launched before it may still
        write to them.
        """
        self._deadline, self._after = seconds + self._timeout_s, after

    def cancel(self, reason: str) -> None:
        """Cancel the load, which then counts as failed."""
        if self.error is None:
            self._fail(reason)

    def step(self) -> bool:
        """Advance the load without waiting. Returns True when the load has ended, with `error` set
        if it failed.
        """
        try:
            if self.error is None and time.monotonic() >= self._deadline:
                raise TransferError(f"not finished within {self._timeout_s:g} s")
            return self._stage()
        except Exception as error:  # every load must end with a result, whatever the error
            self._fail(f"{error}" if isinstance(error, _ERRORS) else repr(error))
            return self._stage()

    def _fail(self, reason: str) -> None:
        self.error = reason
        for read in self._reads:
            read.cancel(reason)
        self._stage = self._let_go

    def _connect(self) -> bool:
        offer = self._load.offer
        if not self._readers:
            self._readers = self._plan()
        mine = self._reader.transport.name
        if any(mine != each.transport for each in offer.ranks):
            raise ValueError(
                f"transport is {mine!r} here, but {offer.ranks[0].transport!r} in engine "
                f"{offer.engine_id!r}: expected the same transport in both engines"
            )
        for source in self._readers:
            if source not in self._peers:
                address, generation = offer.ranks[source], offer.lease.generation
                peer = self._reader.connect(address.metadata, self.left_s, generation)
                if peer is not None:
                    self._peers[source] = peer
        if len(self._peers) < len(self._readers):
            return False
        if self._after is not None and not self._after.query():
            return False
        for read in self._begin():
            self._reads.append(read)
            self.num_bytes += read.num_bytes
        self._stage = self._wait_for_blocks
        return False

    def _wait_for_blocks(self) -> bool:
        return self._look() if all(read.poll() for read in self._reads) else False

    def _look(self) -> bool:
        """Read the lease slots."""
        if not self._cells:
            if len(self._reader.free_cells) < len(self._peers):
                raise ValueError("too many concurrent loads: expected fewer")
            self._cells = {source: self._reader.free_cells.pop() for source in self._peers}
        lease, inbox = self._load.offer.lease, self._reader.inbox
        self._reads = []
        for source, cell in self._cells.items():
            address = np.array([inbox.ctypes.data + SLOT_BYTES * cell])
            slot = np.array([self._load.offer.ranks[source].leases + SLOT_BYTES * lease.slot])
            read = self._reader.transport.read(
                self._peers[source], address, slot, np.array([SLOT_BYTES]), timeout_s=self.left_s
            )
            self._reads.append(read)
        self._stage = self._wait_for_slots
        return False

    def _wait_for_slots(self) -> bool:
        if not all(read.poll() for read in self._reads):
            return False
        offer = self._load.offer
        over = {
            is_lease_over(int(self._reader.inbox[cell]), offer.lease.generation)
            for cell in self._cells.values()
        }
        if True in over:
            raise TransferError(
                f"the lease of request {offer.request_id} has ended: set a longer lease_s in "
                f"engine {offer.engine_id!r}"
            )
        if None in over:  # the offer arrived before the sender's ranks began the lease
            self._next_look = time.monotonic() + _AGAIN_S
            self._stage = self._wait_to_look
            return False
        self._tell()
        return self._end()

    def _wait_to_look(self) -> bool:
        return self._look() if time.monotonic() >= self._next_look else False

    def _let_go(self) -> bool:
        """End a failed load once the transport no longer writes to its blocks. Returns whether it
        has ended.
        """
        if not all(read.is_released for read in self._reads):
            return False
        self._tell()
        return self._end()

    def _tell(self) -> None:
        """Notify the sender's ranks that this rank has finished reading.

        Lost peers are not notified. If the load failed before all peers were connected,
        `is_told` stays False.
        """
        offer = self._load.offer
        self.is_told = 0 < len(self._readers) == len(self._peers)
        for source, peer in self._peers.items():
            message = done_message(offer.request_id, offer.lease.generation, self._readers[source])
            try:
                self._reader.transport.send(peer, message)
            except (*_ERRORS, RuntimeError):  # RuntimeError: the transport is closed
                continue

    def _end(self) -> bool:
        self._reader.free_cells += self._cells.values()
        self._cells = {}
        return True


def readers_of_sources(
    local: Sequence[GroupLayout], remote: Sequence[GroupLayout], local_rank: int
) -> dict[int, int]:
    """Return, for each remote rank from which this rank reads, the number of local ranks that read
    from it.

    For rank 0, the result also contains the remote replicas that no rank reads, because rank 0
    notifies them.
    """
    by_source: dict[int, set[int]] = {}
    for mine, theirs in zip(local, remote):
        for source, ranks in enumerate(source_readers(mine.description, theirs.description)):
            by_source.setdefault(source, set()).update(ranks)
    readers = {source: ranks or {0} for source, ranks in by_source.items()}
    return {source: len(ranks) for source, ranks in readers.items() if local_rank in ranks}
