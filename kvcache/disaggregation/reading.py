"""One request's load on one rank: reads, the check of the lease, and word to the sender."""

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

from kvcache.disaggregation.layout import GroupLayout
from kvcache.disaggregation.leases import (
    SLOT_BYTES,
    SLOT_WORDS,
    Progress,
    done_message,
    read_slot,
)
from kvcache.disaggregation.steps import Load
from kvcache.transfer.plan.readers import source_readers
from kvcache.transfer.transport.base import TransferError, Transport
from kvcache.transfer.transport.metadata import Metadata, parse_metadata
from kvcache.worker.swap.streams import Event, streams_of

_ERRORS = (TransferError, ConnectionError, OSError, ValueError, TypeError)
_NUM_CELLS = 4096  # slots of leases that can be read at once
_AGAIN_S = 0.002  # between two looks at what a sender has computed


class Pending(Protocol):
    """Reads under way: a transport's transfer, or several as one."""

    num_bytes: int

    def poll(self) -> bool: ...

    def cancel(self, reason: str) -> None: ...

    @property
    def is_released(self) -> bool: ...


class Reader:
    """What the loads of a rank share: a transport, the streams of its pages' device, and cells into which
    slots of leases are read."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport, self.streams = transport, streams_of(device)
        self.inbox = np.zeros((_NUM_CELLS, SLOT_WORDS), np.int64)
        self.free_cells = list(range(_NUM_CELLS))
        transport.register([(self.inbox.ctypes.data, self.inbox.nbytes)])
        self._calls: dict[str, _Call] = {}
        # By agent: its incarnation, and the latest lease of which it has made an offer.
        self._latest: dict[str, tuple[str, int]] = {}
        self._lock = threading.Lock()

    def connect(self, metadata: str, timeout_s: float, generation: int = 0) -> str | None:
        """The name of a peer; None while a thread connects to it, beside which other loads go on.

        ConnectionError or ValueError; one that was not reached is not tried again for as long as that
        took at most, so that its requests fail at once. generation: of the offer's lease. An agent that
        was started again makes later ones: then its earlier incarnation is disconnected, which may be
        stopped and hold the name; its loads fail.
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
        """`connect`, for its thread; waits."""
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
        """Disconnects an earlier incarnation; False where none was in the way."""
        with self._lock:
            known = self._latest.get(theirs.agent)
            if known is None:
                return False
            if known[0] == theirs.incarnation:  # another call has made way
                return True
            if generation <= known[1]:
                return False
            self._latest[theirs.agent] = theirs.incarnation, generation
            with suppress(ValueError):  # it has ended meanwhile
                self.transport.disconnect(theirs.agent)
        return True


class _Call(threading.Thread):
    """Connects to a peer. until: a time of `time.monotonic` to which its error is remembered."""

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
        except Exception as error:  # raised where the load is
            self.error = error
        self.until = time.monotonic() + self._timeout_s


class Read(ABC):
    """A load under way: `step` is called until it returns True.

    Blocks first, then the slots of the lease: so what was read is right if the lease has not ended. Of
    an offer that is computed meanwhile, slots are read first, and blocks as they say. A load that fails
    ends when the transport has let go of its blocks.
    """

    def __init__(self, reader: Reader, load: Load, timeout_s: float) -> None:
        self.error: str | None = None
        self.num_bytes = 0
        self._reader, self._load = reader, load
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._after: Event | None = None
        self._peers: dict[int, str] = {}
        self._cells: dict[int, int] = {}
        self._reads: list[Pending] = []
        self._readers: Mapping[int, int] = {}
        self._is_complete, self._next_look = False, 0.0
        self._stage: Any = self._connect

    @abstractmethod
    def _plan(self) -> Mapping[int, int]:
        """By remote rank that this one reads or tells: how many ranks it waits for. ValueError."""

    @abstractmethod
    def _begin(self, progress: Mapping[int, Progress] | None) -> Iterable[Pending]:
        """Begins what is to be read next, of what each remote rank has computed; None: all. ValueError
        or TransferError."""

    @abstractmethod
    def _has_all(self) -> bool:
        """Whether nothing is left for `_begin`."""

    @property
    def left_s(self) -> float:
        """Seconds to the deadline, not below a millisecond."""
        return max(self._deadline - time.monotonic(), 0.001)

    def count_from(self, seconds: float, after: Event | None = None) -> None:
        """The time began earlier, by time.monotonic: when the load was asked for. after: blocks are read
        once that has happened, as work that was launched before may write to them still."""
        self._deadline, self._after = seconds + self._timeout_s, after

    def cancel(self, reason: str) -> None:
        """Gives it up; it ends as one that failed."""
        if self.error is None:
            self._fail(reason)

    def step(self) -> bool:
        """Goes on without waiting; True once the load has ended, well or with `error`."""
        try:
            if self.error is None and time.monotonic() >= self._deadline:
                raise TransferError(f"not done within {self._timeout_s:g} s")
            return self._stage()
        except Exception as error:  # whatever it is, the request is to be answered
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
                f"transport is {mine!r} here, {offer.ranks[0].transport!r} in "
                f"engine {offer.engine_id!r}: set the same in both"
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
        if offer.order and self._load.end_token > self._load.first_token:
            return self._look()
        return self._read_on(None)

    def _read_on(self, progress: Mapping[int, Progress] | None) -> bool:
        for read in self._begin(progress):
            self._reads.append(read)
            self.num_bytes += read.num_bytes
        self._stage = self._wait_for_blocks
        return False

    def _wait_for_blocks(self) -> bool:
        if not all(read.poll() for read in self._reads):
            return False
        self._is_complete = self._has_all()
        return self._look()

    def _look(self) -> bool:
        """Reads the slots of the lease."""
        if not self._cells:
            if len(self._reader.free_cells) < len(self._peers):
                raise ValueError("too many loads at once: expected fewer")
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
        states = {
            source: read_slot(self._reader.inbox[cell], offer.lease.generation)
            for source, cell in self._cells.items()
        }
        over = {state.is_over for state in states.values()}
        if True in over:
            raise TransferError(
                f"the lease of request {offer.request_id} is over: set a longer lease_s in "
                f"engine {offer.engine_id!r}"
            )
        if None in over:  # told before the sender's ranks knew of it
            return self._look_later()
        if self._is_complete:
            self._tell()
            return self._end()
        self._reads = []
        self._read_on({source: state.progress for source, state in states.items()})
        return False if self._reads or self._has_all() else self._look_later()

    def _look_later(self) -> bool:
        self._next_look = time.monotonic() + _AGAIN_S
        self._stage = self._wait_to_look
        return False

    def _wait_to_look(self) -> bool:
        return self._look() if time.monotonic() >= self._next_look else False

    def _let_go(self) -> bool:
        """Of a load that failed: True once the transport no longer writes to its blocks."""
        if not all(read.is_released for read in self._reads):
            return False
        self._tell()
        return self._end()

    def _tell(self) -> None:
        """Tells the sender's ranks that this one reads no more; a peer that is gone needs no word."""
        offer = self._load.offer
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
    """By remote rank that a local rank reads, how many ranks read it. Rank 0 tells a replica that none
    reads."""
    by_source: dict[int, set[int]] = {}
    for mine, theirs in zip(local, remote):
        for source, ranks in enumerate(source_readers(mine.description, theirs.description)):
            by_source.setdefault(source, set()).update(ranks)
    readers = {source: ranks or {0} for source, ranks in by_source.items()}
    return {source: len(ranks) for source, ranks in readers.items() if local_rank in ranks}
