# SPDX-License-Identifier: Apache-2.0
"""Tests that KV of an adapter is neither offered, loaded nor stored under other weights."""

import json
import time
from contextlib import ExitStack

import pytest

from kvcache import Admit, External, KVCacheManager, KVStorage, Request, StepReport
from kvcache_exchange.store import StoreTier
from tests.machinery.disaggregation_engine import Engine
from tests.machinery.stores import MemoryStore

ALPHA, BETA = ("alpha", "/adapters/alpha"), ("beta", "/adapters/beta")
TOKENS = list(range(100))
OTHER = "the offer is for other tokens, images or another adapter"


@pytest.fixture
def engines():
    """Create a sender and a receiver, and close them after the test."""
    with ExitStack() as stack:
        yield [stack.enter_context(Engine(name)) for name in ("p", "d")]


def offer_of(sender, name, lora, tokens=TOKENS):
    request = Request(name, tokens, lora=lora)
    assert sender.prefill(request) is not None
    return json.loads(json.dumps(sender.connector.publish(request)))


def finish(receiver, request):
    loaded = receiver.loaded(request)
    receiver.recompute(request, loaded)
    assert receiver.wrong(request, request.num_tokens) is None
    receiver.manager.free(request)
    return loaded


# Disaggregation ----------------------------------------------------------------------------------------


def test_an_offer_is_loaded_only_with_the_same_version(engines):
    sender, receiver = engines
    loras = [None, ALPHA, (*ALPHA, "1"), (*ALPHA, "2")]
    for number, lora in enumerate(loras):
        offer = offer_of(sender, f"{number}", lora)
        for other in loras:
            request = Request(f"{number}", [*TOKENS, 1], lora=other)
            if other == lora:
                assert receiver.connector.match(request, offer) == 100
                receiver.connector.cancel(request)
            else:
                with pytest.raises(ValueError, match=OTHER):
                    receiver.connector.match(request, offer)
    assert sender.drained() and receiver.drained()


@pytest.mark.parametrize("forgets", ["sender", "receiver", "both"])
def test_no_kv_of_a_forgotten_adapter_is_exchanged(engines, forgets):
    sender, receiver = engines
    before = offer_of(sender, "before", ALPHA)
    for name, engine in zip(("sender", "receiver"), engines):
        if forgets in (name, "both"):
            engine.manager.cache.forget_adapter("alpha")
    after = offer_of(sender, "after", ALPHA)
    for name, offer in (("before", before), ("after", after)):
        request = Request(name, [*TOKENS, 1], lora=ALPHA)
        if (name, forgets) == ("before", "sender"):  # computed with weights that the receiver knows
            assert receiver.connector.match(request, offer) == 100
            receiver.connector.cancel(request)
            continue
        with pytest.raises(ValueError, match=OTHER):
            receiver.connector.match(request, offer)
    for lora in (None, BETA):  # the others are not affected
        name = f"{lora}"
        request, offer = Request(name, [*TOKENS, 1], lora=lora), offer_of(sender, name, lora)
        assert receiver.admit(request, offer) and finish(receiver, request).error is None


def test_a_load_that_is_under_way_is_discarded(engines):
    sender, receiver = engines
    request = Request("r", [*TOKENS, 1], lora=ALPHA)
    assert receiver.admit(request, offer_of(sender, "r", ALPHA))
    receiver.manager.cache.forget_adapter("alpha")
    loaded = finish(receiver, request)
    assert (loaded.num_computed_tokens, loaded.num_loaded_tokens) == (0, 0)
    assert loaded.error == "its adapter was forgotten"
    again = Request("again", [*TOKENS, 1], lora=ALPHA)
    assert receiver.manager.cache.cached_tokens(again).with_host == 0
    assert sender.drained() and receiver.drained()


def test_a_match_from_before_is_not_begun(engines):
    sender, receiver = engines
    offer = offer_of(sender, "r", ALPHA)
    request = Request("r", [*TOKENS, 1], lora=ALPHA)
    assert receiver.connector.match(request, offer) == 100
    receiver.manager.cache.forget_adapter("alpha")
    assert receiver.connector.match(request) == 0
    receiver.manager.step(new=[Admit(request, external=External(100, delayed=True))])
    with pytest.raises(ValueError, match="has no load to begin"):
        receiver.connector.begin(request)
    receiver.connector.cancel(request)
    assert receiver.drained()


# Stores ------------------------------------------------------------------------------------------------


class Stored:
    """An engine whose blocks go to a store, and come from it."""

    def __init__(self, store, stack):
        self.manager = KVCacheManager(16, 40, 256, num_preallocate_tokens=0, enable_events=True)
        pages = KVStorage(40, 16, num_kv_heads=1, head_size=8).pages
        self.tier = StoreTier(self.manager, pages, store, model="m", timeout_s=60)
        stack.callback(self.tier.close)

    def compute(self, request):
        plan = self.manager.step(new=[request])
        self.report(plan)

    def report(self, plan):
        report = StepReport(plan.step_id, True)
        self.manager.report(report)
        self.tier.save(report)
        while self.tier.is_busy:
            self.tier.poll()
            time.sleep(0.001)

    def match(self, request):
        while (count := self.tier.match(request)) is None:
            time.sleep(0.001)
        return count

    def load(self, request):
        count = self.match(request)
        self.manager.step(new=[Admit(request, external=External(count, delayed=True))])
        self.tier.begin(request)

    def arrived(self):
        while not (found := self.tier.poll()):
            time.sleep(0.001)
        return found[0]


@pytest.fixture
def stored():
    """Create two engines with one store, and close them after the test."""
    with ExitStack() as stack:
        store = MemoryStore()
        yield Stored(store, stack), Stored(store, stack)


def test_blocks_of_a_forgotten_adapter_are_not_loaded_from_a_store(stored):
    one, other = stored
    for name, lora in (("a", ALPHA), ("b", BETA), ("v", (*ALPHA, "2"))):
        one.compute(Request(name, TOKENS, lora=lora))
    asked = Request("asked", TOKENS, lora=ALPHA)
    assert other.match(asked) == 96
    assert other.match(Request("v", TOKENS, lora=(*ALPHA, "3"))) == 0
    other.manager.cache.forget_adapter("alpha")
    assert other.match(asked) == 0  # although its lookup found them
    for lora, count in ((ALPHA, 0), ((*ALPHA, "2"), 0), (BETA, 96)):
        assert other.match(Request(f"{lora}", TOKENS, lora=lora)) == count
    assert one.match(Request("again", [*TOKENS, 1], lora=ALPHA)) == 0  # cached on the device


def test_a_load_from_a_store_that_is_under_way_is_discarded(stored):
    one, other = stored
    one.compute(Request("a", TOKENS, lora=ALPHA))
    request = Request("r", TOKENS, lora=ALPHA)
    other.load(request)
    other.manager.cache.forget_adapter("alpha")
    arrived = other.arrived()
    assert (arrived.num_computed_tokens, arrived.num_loaded_tokens) == (0, 0)
    assert arrived.error == "its adapter was forgotten"


def test_what_a_forgotten_adapter_computes_is_stored_for_this_manager_only(stored):
    one, other = stored
    one.manager.cache.forget_adapter("alpha")
    running = Request("running", TOKENS, lora=ALPHA)
    one.compute(running)
    one.manager.cache.forget_adapter("alpha")
    running.append_tokens([1] * 30)
    one.report(one.manager.step([one.manager.row(running)], [30]))
    assert other.match(Request("o", [*TOKENS, *[1] * 30], lora=ALPHA)) == 0
    one.compute(Request("new", TOKENS, lora=ALPHA))
    one.manager.cache.evict(range(1, 40))
    assert one.match(Request("n", [*TOKENS, *[1] * 30], lora=ALPHA)) == 96  # of `new`
    assert other.match(Request("p", TOKENS, lora=ALPHA)) == 0
