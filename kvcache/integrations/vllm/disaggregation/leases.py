"""Leases of a producer's rank: which requests' blocks are kept, until readers are done or time is up."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

import numpy as np

from kvcache.integrations.vllm.disaggregation.offer import Lease

NUM_SLOTS = 8192


@dataclass
class _Held:
    lease: Lease
    deadline: float  # by time.monotonic
    done: set[str] = field(default_factory=set)


class Leases:
    """An int64 per lease, in memory that readers read after the blocks.

    While a slot holds a lease's generation, the blocks are what they were; minus the generation, or a
    later one, says that the lease is over; anything earlier, that it has not begun. So a reader that
    finds the generation behind its bytes knows that these are right, by no clock and without an answer.
    """

    def __init__(self) -> None:
        self.slots = np.zeros(NUM_SLOTS, np.int64)
        self._held: dict[str, _Held] = {}

    def begin(self, request_id: str, lease: Lease, seconds: float) -> None:
        """Keeps a request's blocks for so long, at most."""
        self._held[request_id] = _Held(lease, time.monotonic() + seconds)
        self.slots[lease.slot] = lease.generation

    def note(self, message: bytes, peer: str) -> None:
        """A reader's message, as `done_message` makes them; others are ignored."""
        try:
            values = json.loads(message)
            request_id, generation = values["done"], int(values["generation"])
            num_readers = int(values["readers"])
        except (ValueError, TypeError, KeyError):
            return
        held = self._held.get(request_id)
        if held is None or held.lease.generation != generation:
            return
        held.done.add(peer)
        if len(held.done) >= num_readers:
            held.deadline = 0.0

    def ended(self) -> set[str]:
        """The requests whose lease is over since the last call; readers find that from now on."""
        now = time.monotonic()
        over = {request_id for request_id, held in self._held.items() if held.deadline <= now}
        for request_id in over:
            lease = self._held.pop(request_id).lease
            self.slots[lease.slot] = -lease.generation
        return over

    def __len__(self) -> int:
        return len(self._held)


def done_message(request_id: str, generation: int, num_readers: int) -> bytes:
    """What each of `num_readers` ranks sends when it will read no more of a request."""
    values = {"done": request_id, "generation": generation, "readers": num_readers}
    return json.dumps(values).encode()


def is_over(slot: int, generation: int) -> bool | None:
    """Whether a lease is over, by its slot; None where it has not begun."""
    if slot == generation:
        return False
    return True if abs(slot) >= generation else None
