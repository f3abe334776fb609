# SPDX-License-Identifier: Apache-2.0
"""The engine with sources of external KV: whatever the sources do, answers equal those of the model
alone.
"""

import logging
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

# Skip the file before it imports modules that need transformers.
pytest.importorskip("transformers")

from kvcache.allocator import check_invariants
from kvcache.sources import LoadStats
from kvcache.sources.loads import SourceLoads
from kvcache_exchange.disaggregation import (
    CacheRank,
    Connector,
    ConnectorOptions,
    RemotePrefill,
    layouts_of_plan,
)
from kvcache_exchange.disaggregation.steps import Results
from kvcache_exchange.store import StoreTier
from kvcache_serve.engine import Engine, SamplingParams
from kvcache_serve.engine.transformers import attach
from tests.machinery.dense_models import MODELS, dense, greedy
from tests.machinery.shared import spread
from tests.machinery.stores import MemoryStore, patient
from tests.simulator.served import ModelFailed
from tests.simulator.served_models import ModelServer

logging.getLogger("transformers").setLevel(logging.ERROR)
LONG = np.random.default_rng(3).integers(1, 500, 90).tolist()
FOUR = SamplingParams(max_tokens=4)


def an_engine(*make_sources, **options):
    """Create an engine with a tiny Llama model and with sources that are created for its cache."""
    sizes = {"max_model_len": 128, "max_num_batched_tokens": 64, "num_preallocate_tokens": 0}
    paged = attach(dense("llama", 2), "256KiB", enable_events=True, **sizes, **options)
    return Engine(paged, sources=[make(paged.cache) for make in make_sources])


def a_tier(store, **options):
    def make(cache):
        return StoreTier(
            cache.manager, cache.pages, store, model="llama", circuit=patient(), **options
        )

    return make


def answer(engine, prompt=LONG):
    """Generate an answer and return its four tokens."""
    (generation,) = engine.generate([prompt], FOUR)
    return generation.samples[0].token_ids


def settle(engine):
    """Step until the engine is idle. Check that its pool is empty and intact."""
    until = time.monotonic() + 60
    while engine.is_busy:
        assert time.monotonic() < until, "the engine stays busy"
        engine.step()
    manager = engine.cache.manager
    check_invariants(manager)
    assert manager.pool.num_free == manager.pool.num_total and manager.pool.num_kept == 0


@pytest.fixture
def filled():
    """A store with the blocks of one prompt, filled by an engine that was closed afterwards."""
    store = MemoryStore()
    engine = an_engine(a_tier(store))
    assert answer(engine) == greedy(dense("llama", 2), LONG, 4)
    settle(engine)
    assert engine.sources[0].close() and len(store.values) == 93 // 16
    store.is_closed = False
    return store


def test_a_load_begins_after_the_device_has_cleared_its_pages(filled):
    engine, order = an_engine(a_tier(filled)), []
    source = engine.sources[0]
    begin, engine.scheduler._synchronize = source.begin, lambda: order.append("synchronize")
    source.begin = lambda request: (order.append("begin"), begin(request))
    answer(engine)
    assert order == ["synchronize", "begin"]
    settle(engine)


def test_closing_an_engine_stores_queued_blocks():
    store = MemoryStore()
    put = store.put
    store.put = lambda keys, values: store.goes_on.wait(60) and put(keys, values)
    # The store writes one block at a time.
    engine = an_engine(a_tier(store, staging_bytes=1, timeout_s=60))
    answer(engine)
    assert len(store.values) < 93 // 16
    store.goes_on.set()
    engine.close()
    assert len(store.values) == 93 // 16 and store.is_closed


def test_closing_an_engine_without_a_store_does_not_wait_for_busy_sources():
    source = Scripted()
    engine = an_engine(source.of)
    answer(engine)
    source.is_busy = True  # as with leases of prompts that others load
    engine.close()


def test_other_requests_are_served_while_a_source_lookup_is_pending(filled):
    source = Scripted(tokens=None)
    engine = an_engine(source.of)
    waiting = engine.add(LONG, FOUR)
    source.only = {LONG[0]}
    assert answer(engine, [1, 2, 3]) == greedy(dense("llama", 2), [1, 2, 3], 4)
    assert waiting.samples[0].token_ids == [] and engine.scheduler.is_waiting_for_sources
    assert engine.abort(waiting.request_id)
    settle(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "name"), spread([(i, MODELS[i % len(MODELS)]) for i in range(27)], 4)
)
def test_random_runs_with_a_failing_store_give_the_models_answers(name, seed):
    run = ModelServer(name, seed, with_store=True)
    run.run()
    assert run.num_compared > 0


class Scripted:
    """A source that claims to have tokens of prompts that start with `only`, but never delivers them."""

    name = "scripted"

    def __init__(self, tokens=0):
        self.tokens, self.only, self.asked = tokens, None, 0
        self.is_busy, self.error = False, None

    def of(self, cache):
        self.loads = SourceLoads(cache.manager, LoadStats())
        return self

    def match(self, request):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.tokens if self.only is None or request.token_ids[0] in self.only else 0

    def begin(self, request):
        raise ValueError("it is gone")

    def poll(self):
        return []

    def save(self, report):
        pass

    def cancel(self, request):
        self.loads.free(request)

    def close(self):
        pass


@pytest.mark.parametrize("refuses", ["match", "begin"])
def test_source_that_declines_is_not_queried_again(refuses):
    source = Scripted(32)
    engine = an_engine(source.of)
    if refuses == "match":
        source.error = ValueError("another model")
    assert answer(engine) == greedy(dense("llama", 2), LONG, 4)
    assert source.asked == 1
    settle(engine)


def test_non_sources_and_two_stores_are_rejected():
    engine = an_engine()
    with pytest.raises(TypeError, match=r"sources\[0\] is 5: expected a KVSource"):
        Engine(engine.model, sources=[5])
    tiers = [a_tier(MemoryStore())(engine.cache) for _ in range(2)]
    with pytest.raises(ValueError, match="sources has 2 stores: expected at most one"):
        Engine(engine.model, sources=tiers)
    assert all(tier.close() for tier in tiers)


class HeldRank:
    """A rank that reports each load as failed immediately, but as released only once `is_held` is
    False.

    The bytes still arrive, as they would from a slow peer.
    """

    def __init__(self, rank):
        self._rank, self.is_held, self._kept = rank, False, []
        self.handshake, self.close = rank.handshake, rank.close
        self._begun = []

    def begin(self, step):
        if self.is_held:
            self._begun += step.loads
        self._rank.begin(step)

    def take_results(self):
        results = self._rank.take_results()
        if self.is_held:
            self._kept += results.received | results.released
            begun, self._begun = self._begun, []
            return Results(sent=results.sent, failed=dict.fromkeys(begun, "a cable was cut"))
        results.released |= set(self._kept)
        self._kept = []
        return results


class WithOffer:
    """A source that wraps a connector and passes it the offer that belongs to each prompt."""

    def __init__(self, connector, offer):
        self._connector, self.offer = connector, offer

    def __getattr__(self, name):
        return getattr(self._connector, name)

    def match(self, request):
        offer, self.offer = self.offer, None
        return self._connector.match(request, offer)


class Pair:
    """Two engines in this process: the first prefills, and the second loads the KV and decodes."""

    def __init__(self, stack):
        self.sender, self.receiver = an_engine(), an_engine()
        self.connectors, self.ranks = [], []
        for name, engine in (("p", self.sender), ("d", self.receiver)):
            cache = engine.cache
            layouts = layouts_of_plan(cache.plan, cache.storages, engine_id=name)
            options = ConnectorOptions(transport="tcp", timeout_s=20)
            rank = HeldRank(CacheRank(layouts, cache.storages, options=options))
            stack.callback(rank.close)
            self.ranks.append(rank)
            self.connectors.append(
                Connector(cache.manager, [rank], engine_id=name, options=options)
            )
        offers = []

        def publish(request):
            offers.append(self.connectors[0].publish(request))

        self.sender.add(LONG[:-1], SamplingParams(max_tokens=1), free=publish)
        while self.sender.num_unfinished:
            self.sender.step()
        self.source = WithOffer(self.connectors[1], offers[0])
        self.receiver = Engine(self.receiver.model, sources=[self.source])

    def held(self):
        """Return the number of the receiver's blocks that are not free."""
        pool = self.receiver.cache.manager.pool
        return pool.num_total - pool.num_free


@pytest.fixture
def pair():
    with ExitStack() as stack:
        yield Pair(stack)


def test_prompt_computed_by_another_engine_is_loaded(pair):
    assert answer(pair.receiver) == greedy(dense("llama", 2), LONG, 4)
    stats = pair.source.stats
    assert (stats.loaded_tokens, stats.failed_loads) == (89, 0)
    assert pair.receiver.metrics.computed_tokens == 1 + 3
    settle(pair.receiver)


def test_blocks_of_a_failed_load_are_quarantined_and_the_prompt_is_computed(pair):
    pair.ranks[1].is_held = True
    assert answer(pair.receiver) == greedy(dense("llama", 2), LONG, 4)
    assert pair.held() == pair.source.num_quarantined_blocks == 6 and pair.receiver.is_busy
    assert pair.source.stats.quarantined_loads == 1 and pair.source.stats.failed_tokens == 89
    pair.ranks[1].is_held = False
    settle(pair.receiver)


def test_late_offer_is_declined_and_the_prompt_is_computed(pair):
    sender, receiver = pair.connectors
    prefill = RemotePrefill(receiver, "127.0.0.1:1", timeout_s=0.2)
    is_late = threading.Event()
    offer = {"offer": pair.source.offer}
    prefill._server.fetch = lambda path, body: (is_late.wait(20), offer)[1]
    engine = Engine(pair.receiver.model, sources=[prefill])
    assert answer(engine) == greedy(dense("llama", 2), LONG, 4)
    assert (prefill.stats.asked_requests, prefill.stats.unanswered_requests) == (1, 1)
    assert sender.num_leased_requests == 1 and engine.is_busy
    is_late.set()
    settle(engine)
    until = time.monotonic() + 30
    while sender.num_leased_requests:
        assert time.monotonic() < until, "the sender is not told"
        sender.poll()
    assert prefill.stats.loads == 0


def test_an_abort_while_loading_quarantines_the_blocks(pair):
    pair.ranks[1].is_held = True
    generation = pair.receiver.add(LONG, FOUR)
    pair.receiver.step()
    assert pair.receiver.abort(generation.request_id) and pair.receiver.num_unfinished == 0
    assert pair.held() == pair.source.num_quarantined_blocks == 6
    pair.receiver.step()
    assert pair.held() == 6
    pair.ranks[1].is_held = False
    settle(pair.receiver)


@pytest.mark.parametrize("fails", ["forward", "apply"])
def test_failed_step_during_a_load_changes_no_answer(pair, fails):
    engine, other = pair.receiver, [5, 6, 7]
    owner = engine.model if fails == "forward" else engine.cache.worker
    right, count = getattr(owner, fails), [0]

    def failing(given):
        count[0] += 1
        if count[0] == 1:
            raise ModelFailed
        return right(given)

    setattr(owner, fails, failing)
    generations = [engine.add(prompt, FOUR) for prompt in (LONG, other)]
    with pytest.raises(ModelFailed):
        engine.step()
    while engine.num_unfinished:
        engine.step()
    for generation, prompt in zip(generations, (LONG, other)):
        assert generation.samples[0].token_ids == greedy(dense("llama", 2), prompt, 4)
    settle(engine)
