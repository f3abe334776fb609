# SPDX-License-Identifier: Apache-2.0
"""Leases on a sender's rank.

A leased request's blocks are kept until all readers have finished or the lease expires.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

NUM_SLOTS = 8192
SLOT_BYTES = 8


@dataclass(frozen=True)
class Lease:
    """A lease, which keeps a request's blocks as long as the lease's slot on each rank contains its
    `generation`.

    `until` is the time of expiry by the sender's clock, in seconds since the epoch. It is only
    informative: the slot determines whether the lease has ended.
    """

    slot: int
    generation: int
    until: float


@dataclass
class _Held:
    lease: Lease
    deadline: float
    done: set[str] = field(default_factory=set)


class LeaseNumbers:
    """Assigns a lease slot and a generation to each request. Both are the same on all ranks of a
    sender.
    """

    def __init__(self) -> None:
        self._slots = list(range(NUM_SLOTS))
        self._slot_of: dict[str, int] = {}
        # Greater than every generation of an earlier process that used this memory.
        self._generation = time.time_ns() // 1_000

    def take(self, request_id: str, seconds: float) -> Lease | None:
        """Return a new lease, or None if all slots are in use or the request already has a lease."""
        if not self._slots or request_id in self._slot_of:
            return None
        self._generation += 1
        self._slot_of[request_id] = slot = self._slots.pop()
        return Lease(slot, self._generation, time.time() + seconds)

    def give_back(self, request_id: str) -> bool:
        """Free a request's slot once its lease has ended on all ranks. Returns whether the request
        had a lease.
        """
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self._slots.append(slot)
        return slot is not None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slot_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._slot_of)

    def __len__(self) -> int:
        return len(self._slot_of)


class Leases:
    """The lease slots of one rank, with one word per slot. Readers read the slots after the blocks.

    While a slot contains a lease's generation, the leased blocks are unchanged. The negated
    generation, or a later generation, means that the lease has ended. An earlier generation means
    that the lease has not begun. If the slot still contains the lease's generation after a reader
    has read the blocks, the data it read is valid. This check needs neither a clock nor a reply
    from the sender.

    Args:
        clock: Function that returns the time in seconds. Replays pass their own clock.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self.slots = np.zeros(NUM_SLOTS, np.int64)
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()

    def begin(self, request_id: str, lease: Lease, seconds: float) -> None:
        """Keep a request's blocks for at most `seconds`."""
        with self._lock:
            self._held[request_id] = _Held(lease, self._clock() + seconds)
            self.slots[lease.slot] = lease.generation

    def end(self, request_id: str) -> None:
        """End a lease early. Readers can see that it has ended once this method returns."""
        with self._lock:
            if (held := self._held.get(request_id)) is not None:
                self._end(held)

    def end_all(self) -> None:
        """End all leases early. Readers can see that they have ended once this method returns."""
        with self._lock:
            for held in self._held.values():
                self._end(held)

    def note(self, message: bytes, peer: str) -> None:
        """Process a reader's message, created by `done_message`. Other messages are ignored."""
        try:
            values = json.loads(message)
            request_id, generation = values["done"], values["generation"]
            num_readers = values["readers"]
        except Exception:  # peers are untrusted and may even send deeply nested lists
            return
        if [type(each) for each in (request_id, generation, num_readers)] != [str, int, int]:
            return
        with self._lock:
            held = self._held.get(request_id)
            if held is None or held.lease.generation != generation:
                return
            held.done.add(peer)
            if len(held.done) >= num_readers:
                held.deadline = 0.0

    def ended(self) -> set[str]:
        """Return the requests whose leases have ended since the last call. Once this method
        returns, readers can see that these leases have ended.
        """
        now = self._clock()
        with self._lock:
            over = {request_id for request_id, held in self._held.items() if held.deadline <= now}
            for request_id in over:
                self._end(self._held.pop(request_id))
        return over

    def _end(self, held: _Held) -> None:
        held.deadline = 0.0
        self.slots[held.lease.slot] = -held.lease.generation

    def __len__(self) -> int:
        return len(self._held)


def done_message(request_id: str, generation: int, num_readers: int) -> bytes:
    """Return the message that a rank sends after it has finished reading a request that
    `num_readers` ranks read.
    """
    values = {"done": request_id, "generation": generation, "readers": num_readers}
    return json.dumps(values).encode()


def is_lease_over(word: int, generation: int) -> bool | None:
    """Return whether a lease has ended, from the word in its slot. None: it has not begun."""
    return False if word == generation else True if abs(word) >= generation else None
