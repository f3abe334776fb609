# SPDX-License-Identifier: Apache-2.0
"""Tests that KV of an adapter is neither offered, loaded nor stored under other weights."""

from contextlib import ExitStack

import pytest

from kvcache import Admit, External, Request
from kvcache_exchange_tests.test_disaggregation import asked, lone, offered
from tests.machinery.disaggregation_engine import Engine

ALPHA, BETA = ("alpha", "/adapters/alpha"), ("beta", "/adapters/beta")
TOKENS = list(range(100))
OTHER = "the offer is for other tokens, images or another adapter"


@pytest.fixture
def engines():
    """Create a sender and a receiver, and close them after the test."""
    with ExitStack() as stack:
        yield [stack.enter_context(Engine(name)) for name in ("p", "d")]


def offer_of(sender, name, lora):
    request = Request(name, TOKENS, lora=lora)
    assert sender.prefill(request) is not None
    return offered(sender.connector, request)


def finish(receiver, request):
    loaded = receiver.loaded(request)
    receiver.recompute(request, loaded)
    assert receiver.wrong(request, request.num_tokens) is None
    receiver.manager.free(request)
    return loaded


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


def test_a_match_from_before_is_not_begun():
    (sender, theirs, _), (receiver, manager, _) = lone("p"), lone("d")
    request = Request("r", range(70), lora=ALPHA)
    theirs.step(new=[request])
    offer = sender.publish(request)
    request = asked(lora=ALPHA)
    assert receiver.match(request, offer) == 70
    manager.cache.forget_adapter("alpha")
    assert receiver.match(request) == 0
    manager.step(new=[Admit(request, external=External(70, delayed=True))])
    with pytest.raises(ValueError, match="has no load to begin"):
        receiver.begin(request)


# Stores ------------------------------------------------------------------------------------------------


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
