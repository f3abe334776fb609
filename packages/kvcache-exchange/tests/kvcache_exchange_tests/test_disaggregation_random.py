# SPDX-License-Identifier: Apache-2.0
"""Random calls to two connectors whose ranks respond at random times. No request may be lost, and
no block may leak.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcache import Admit, External, Request, Status
from kvcache.allocator import check_invariants
from kvcache_exchange_tests.test_disaggregation import lone, offered

NAMES = st.sampled_from([f"r{n}" for n in range(5)])


class Pair(RuleBasedStateMachine):
    """A sender with one rank and a receiver with two ranks.

    This class tracks which requests hold blocks on either side, and why.
    """

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.sender, self.theirs, self.sending = lone("p", num_blocks=40)
        self.receiver, self.ours, self.loading = lone(
            num_ranks=2, num_blocks=40, clock=lambda: self.now
        )
        self.offers, self.leased = {}, set()
        self.running = {}  # requests that the receiver computes without a load
        self.under_way = {}  # name -> request, until `poll` returns it
        self.left = {}  # name -> ranks that have not released the blocks

    @rule(name=NAMES, first=st.sampled_from([0, 0, 1000]), count=st.integers(1, 200))
    def publish(self, name, first, count):
        request = Request(name, range(first, first + count))
        if self.theirs.step(new=[request]).status[0] != Status.SERVED:
            return
        offer = offered(self.sender, request)
        assert (offer is None) == (name in self.leased)
        if offer is not None:
            self.leased.add(name)
            self.offers[name] = offer, first, count

    @rule(name=NAMES)
    def lease_ends(self, name):
        if name in self.leased:
            self.sending[0].results.sent.add(name)
            self.leased.discard(name)
            assert self.sender.poll() == []

    @rule(name=NAMES)
    def load(self, name):
        if name not in self.offers or name in self.running or name in self.under_way:
            return
        offer, first, count = self.offers[name]
        request = Request(name, range(first, first + count + 1))
        try:
            num_read = self.receiver.match(request, offer)
        except ValueError as refusal:
            assert "may still write to" in str(refusal) and name in self.left
            num_read = 0
        external = External(num_read, delayed=True) if num_read else None
        if self.ours.step(new=[Admit(request, external=external)]).status[0] != Status.SERVED:
            self.receiver.cancel(request)
        elif num_read:
            self.receiver.begin(request)
            self.under_way[name], self.left[name] = request, {0, 1}
        else:
            self.running[name] = request

    @rule(name=NAMES, rank=st.integers(0, 1), how=st.sampled_from(["well", "failed", "let go"]))
    def answer(self, name, rank, how):
        """Make a rank finish a load, fail, or fail and release the blocks."""
        if rank not in self.left.get(name, ()):
            return
        results = self.loading[rank].results
        if how == "well":
            results.received.add(name)
        else:
            results.failed[name] = "why"
        if how == "let go":
            results.released.add(name)
        if how != "failed":
            self.left[name].discard(rank)

    @rule(name=NAMES)
    def cancel(self, name):
        request = self.under_way.pop(name, None) or self.running.pop(name, None)
        if request is not None:
            self.receiver.cancel(request)

    @rule(name=NAMES)
    def finish(self, name):
        if (request := self.running.pop(name, None)) is not None:
            self.ours.free(request)

    @rule(seconds=st.sampled_from([0.0, 1.0, 20.0]))
    def poll(self, seconds):
        self.now += seconds
        for loaded in self.receiver.poll():
            request = self.under_way.pop(loaded.request.request_id)
            if loaded.num_computed_tokens is not None:
                assert not self.left[request.request_id]
                self.running[request.request_id] = request
                if loaded.error is None:
                    assert loaded.num_computed_tokens == request.num_tokens - 1
        self.left = {name: ranks for name, ranks in self.left.items() if ranks}

    @invariant()
    def each_block_is_free_or_held_for_a_reason(self):
        assert self.sender.num_leased_requests == len(self.leased)
        assert (self.theirs.pool.num_kept > 0) == bool(self.leased)
        for manager in (self.theirs, self.ours):
            check_invariants(manager)

    def teardown(self):
        for name in list(self.leased):
            self.lease_ends(name)
        for name, ranks in self.left.items():
            for rank in ranks:
                self.loading[rank].results.received.add(name)
            ranks.clear()
        self.poll(0.0)
        for name in list(self.running):
            self.finish(name)
        assert not self.under_way and self.receiver.num_loading_requests == 0
        for manager in (self.theirs, self.ours):
            assert manager.pool.num_kept == 0
            assert manager.pool.num_free == manager.pool.num_total


TestPair = Pair.TestCase
TestPair.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
