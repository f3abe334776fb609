# SPDX-License-Identifier: Apache-2.0
"""Tests of leases: what readers see in a slot, and random calls that are compared to a reference
model.
"""

import json
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache_exchange.disaggregation import leases as module
from kvcache_exchange.disaggregation.leases import (
    NUM_SLOTS,
    Lease,
    LeaseNumbers,
    Leases,
    done_message,
    is_lease_over,
)


def test_a_lease_ends_when_all_readers_are_done():
    leases, lease = Leases(), Lease(3, 100, 0.0)
    assert is_lease_over(leases.slots[3], 100) is None
    leases.begin("r", lease, 60)
    assert is_lease_over(leases.slots[3], 100) is False
    message = done_message("r", 100, 2)
    assert json.loads(message) == {"done": "r", "generation": 100, "readers": 2}
    for peer in ("a", "a"):  # repeated messages from the same reader are counted once
        leases.note(message, peer)
    leases.note(done_message("r", 99, 1), "b")
    for garbage in (
        *(b"{", b"[]", b'{"done": [], "generation": 100, "readers": 1}', b"\xff", b"[" * 100_000),
        *(b'{"done": "r", "generation": 100, "readers": %s}' % each for each in (b"true", b"1.0")),
        b'{"done": "r", "generation": Infinity, "readers": 1}',
    ):
        leases.note(garbage, "b")
    assert leases.ended() == set() and len(leases) == 1
    leases.note(message, "b")
    assert leases.ended() == {"r"} and len(leases) == 0
    assert is_lease_over(leases.slots[3], 100) is True


def test_lease_expires_for_its_readers_before_the_next_one_begins():
    leases = Leases()
    leases.begin("r", Lease(3, 100, 0.0), 0.01)
    time.sleep(0.02)
    assert leases.ended() == {"r"}
    leases.begin("s", Lease(3, 101, 0.0), 60)
    assert is_lease_over(leases.slots[3], 100) is True
    assert is_lease_over(leases.slots[3], 101) is False


def test_lease_numbers_are_used_once():
    numbers = LeaseNumbers()
    first = numbers.take("r", 1)
    assert numbers.take("r", 1) is None and "r" in numbers
    assert numbers.give_back("r") and not numbers.give_back("r")
    assert numbers.take("r", 1).generation > first.generation
    for number in range(NUM_SLOTS - 1):
        assert numbers.take(str(number), 1) is not None
    assert numbers.take("one more", 1) is None


class Model(RuleBasedStateMachine):
    """The reference model.

    The model tracks when each request's lease expires and which readers have finished. For each
    generation of a slot, it checks what readers see. Time is simulated.
    """

    def __init__(self):
        super().__init__()
        self.now, self.patch = 1000.0, pytest.MonkeyPatch()
        self.patch.setattr(module.time, "monotonic", lambda: self.now)
        self.leases, self.numbers = Leases(), LeaseNumbers()
        self.held = {}  # request -> [lease, end, done]
        self.over = []  # leases that have ended

    def teardown(self):
        self.patch.undo()

    @rule(number=st.integers(0, 5), seconds=st.floats(0.1, 10))
    def begin(self, number, seconds):
        lease = self.numbers.take(f"r{number}", seconds)
        assert (lease is None) == (f"r{number}" in self.held)
        if lease is not None:
            self.leases.begin(f"r{number}", lease, seconds)
            self.held[f"r{number}"] = [lease, self.now + seconds, set()]

    @rule(
        number=st.integers(0, 5),
        peer=st.sampled_from("abc"),
        readers=st.integers(1, 3),
        off=st.sampled_from([0, 0, 0, 1]),
    )
    def note(self, number, peer, readers, off):
        held = self.held.get(f"r{number}")
        generation = (held[0].generation if held else 5) - off
        self.leases.note(done_message(f"r{number}", generation, readers), peer)
        if held and not off:
            held[2].add(peer)
            if len(held[2]) >= readers:
                held[1] = min(held[1], 0.0)

    @rule(number=st.integers(0, 5))
    def end(self, number):
        self.leases.end(f"r{number}")
        if f"r{number}" in self.held:
            self.held[f"r{number}"][1] = -1.0  # readers must see the end of the lease immediately

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def ended(self):
        expected = {name for name, held in self.held.items() if held[1] <= self.now}
        assert self.leases.ended() == expected
        for name in expected:
            self.over.append(self.held.pop(name)[0])
            assert self.numbers.give_back(name)

    @invariant()
    def readers_believe_what_is_kept_and_nothing_else(self):
        for lease, end, _ in self.held.values():
            assert is_lease_over(self.leases.slots[lease.slot], lease.generation) == (end < 0)
        for lease in self.over:
            assert is_lease_over(self.leases.slots[lease.slot], lease.generation) is True
            later = is_lease_over(self.leases.slots[lease.slot], lease.generation + 10**6)
            assert later is None  # None, because this later lease has not begun
        slots = [held[0].slot for held in self.held.values()]
        assert len(set(slots)) == len(slots) == len(self.leases) == len(self.numbers)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
