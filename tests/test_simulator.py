# SPDX-License-Identifier: Apache-2.0
"""The simulator finds nothing wrong, and finds each of a few faults that its oracles are for."""

import functools
import random

import pytest

from kvcache import KVCacheManager, Worker
from kvcache.allocator.prefix_cache import PrefixCache
from kvcache_exchange.disaggregation.offer_calls import OfferCalls
from kvcache_exchange.hints.limits import Ledger
from kvcache_exchange.hints.receipts import ReceiptWriter
from kvcache_exchange.peers import PeerSource
from kvcache_exchange.router_events.translator import EventTranslator
from kvcache_exchange.store import rank as store_rank
from kvcache_serve.engine import Engine as ServingEngine
from kvcache_serve.engine.output_processor import OutputProcessor
from tests.machinery.shared import sampled
from tests.simulator import exchange
from tests.simulator.engine import Wrong
from tests.simulator.events import Sockets
from tests.simulator.node import Node
from tests.simulator.peers import Network
from tests.simulator.served import TableServer
from tests.simulator.world import World, failure_of, run, shrunk

SEEDS_PER_TEST = 4


@pytest.mark.parametrize("first", sampled(range(0, 400, SEEDS_PER_TEST), 3))
def test_seeds_find_nothing_wrong(first):
    for seed in range(first, first + SEEDS_PER_TEST):
        run(seed)


def wrapped(owner, name, change):
    """Return a method that makes the original call with `change(call, self, ...)`."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def changed(self, *args, **kwargs):
        return change(functools.partial(call, self), self, *args, **kwargs)

    return changed


def swaps_in_nothing(call, worker, plan):
    if len(plan.swap_in):
        plan.swap_in = plan.swap_in[:0]
    return call(plan)


def copies_nothing(call, worker, plan):
    if len(plan.copy):
        plan.copy = plan.copy[:0]
    return call(plan)


def forgets_an_event(call, cache):
    events = call()
    return events[:-1] if len(events) > 2 else events


def leaks(call, manager, request, **options):
    if request.request_id.endswith("7"):
        options["keep_blocks"] = True
    return call(request, **options)


def evicts(call, cache, request, **options):
    found = call(request, **options)
    cache.evict(range(1, 6))
    return found


def accepts_all(call, cache, name):
    return call(name) if isinstance(name, str) else None


def publishes_no_removal(call, translator, group, hashes, medium):
    call(group, hashes, medium)
    return []


def offers_wrong_blocks(call, source, tokens, **options):
    offer = call(tokens, **options)
    if offer is not None:
        offer["blocks"] = [[*reversed(blocks)] for blocks in offer["blocks"]]
    return offer


def promises_too_much(call, writer, pending, prefix, num_tokens, *args, **kwargs):
    return call(pending, prefix, prefix.num_tokens, *args, **kwargs)


def has_room(call, ledger, without=None):
    return 1 << 20


def remembers(call, calls, request):
    known = dict(calls._calls)
    call(request)
    calls._calls |= known


FAULTS = {
    "a swap-in is lost": (Worker, "apply", swaps_in_nothing, "check_slots"),
    "a copy is lost": (Worker, "apply", copies_nothing, "check_slots"),
    "an event is lost": (PrefixCache, "drain_events", forgets_an_event, "follow_events"),
    "blocks leak": (KVCacheManager, "free", leaks, "check_end"),
    "a read evicts": (PrefixCache, "hit_tokens", evicts, "snapshot"),
    "a removal is not published": (EventTranslator, "_removed", publishes_no_removal, "check_view"),
    "an offer names wrong blocks": (PeerSource, "offer", offers_wrong_blocks, "check_slots"),
    "a receipt promises too much": (ReceiptWriter, "carried_out", promises_too_much, "told"),
    "hints use all blocks": (Ledger, "room", has_room, "check_hints"),
    "calls are not forgotten": (OfferCalls, "cancel", remembers, "check_end"),
}
# What an oracle does when it is switched off.
OFF = {
    "check_slots": lambda *_: None,
    "follow_events": lambda self: self.manager.cache.drain_events(),
    "check_end": lambda self: None,
    "check_view": lambda *_: True,
    "check_index": lambda *_: None,
    "told": lambda *_: None,
    "snapshot": lambda self: {},
    "check_hints": lambda self: None,
}


def found(most_seeds: int) -> Exception | None:
    """Return what the simulator finds wrong. A fault may also lead to errors of the library."""
    errors = filter(None, (failure_of(seed, range(300)) for seed in range(most_seeds)))
    return next((each for each in errors if isinstance(each, Wrong)), None)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_by_its_oracle_and_only_by_it(name, monkeypatch):
    owner, method, change, oracle = FAULTS[name]
    monkeypatch.setattr(owner, method, wrapped(owner, method, change))
    assert found(60) is not None
    monkeypatch.setattr(Sockets if oracle == "check_view" else Node, oracle, OFF[oracle])
    if oracle in ("check_view", "follow_events"):
        monkeypatch.setattr(Network, "check_index", OFF["check_index"])
    monkeypatch.setattr(Node, "check_plan", lambda *_: None)  # sees the changed plans, too
    monkeypatch.setattr(Node, "check_keep", lambda *_: None)  # sees leaks, too
    assert found(8) is None


def fails(call, engine, *args, **kwargs):
    raise RuntimeError("fails")


def aborts(call, engine):
    deltas = call()
    for generation in engine.generations[:1]:
        engine.abort(generation.request_id)
    return deltas


SERVER_FAULTS = {
    "samples are not forked": (
        OutputProcessor,
        "_with_new_samples",
        lambda _, __, sample: [sample],
    ),
    "steps fail": (ServingEngine, "step", fails),
    "deltas are lost": (ServingEngine, "step", lambda call, _: call()[1:]),
    "requests are ended": (ServingEngine, "step", aborts),
}


@pytest.mark.parametrize("name", SERVER_FAULTS)
def test_fault_of_a_server_is_found(name, monkeypatch):
    owner, method, change = SERVER_FAULTS[name]
    monkeypatch.setattr(owner, method, wrapped(owner, method, change))
    with pytest.raises(Wrong):
        for seed in range(12):
            TableServer(seed).run(6)


def test_wrong_argument_that_is_accepted_is_found(monkeypatch):
    world = World(0)
    monkeypatch.setattr(
        PrefixCache, "forget_adapter", wrapped(PrefixCache, "forget_adapter", accepts_all)
    )
    with world.wire, pytest.raises(Wrong, match="forget_adapter accepts"):
        for i in range(5000):
            engine = world.engines[i % 2]
            engine.rng = random.Random(i)
            engine.wrong_call()


def loads_from_store(seed: int) -> bool:
    return any(each.tier and each.tier.stats.loads for each in run(seed).engines)


@pytest.mark.slow
def test_store_that_garbles_values_is_found_without_their_digests(monkeypatch):
    seeds = [seed for seed in range(60) if loads_from_store(seed)]
    monkeypatch.setattr(store_rank, "faults", lambda values, numbers, *_: [None] * len(numbers))
    monkeypatch.setattr(exchange.SimulatedStore, "fault", lambda self: "corrupt")
    assert any(isinstance(failure_of(seed, range(500)), Wrong) for seed in seeds)


@pytest.mark.slow
def test_failure_shrinks_to_the_operations_that_it_needs(monkeypatch):
    monkeypatch.setattr(Worker, "apply", wrapped(Worker, "apply", copies_nothing))
    seed = next(seed for seed in range(30) if failure_of(seed, range(300)) is not None)
    left, error = shrunk(seed, range(300))
    assert len(left) < 30 and failure_of(seed, left) is not None
    assert any("step" in line for line in error.script)
