# SPDX-License-Identifier: Apache-2.0
"""Engines in one process that are peers of each other, with faults in all communication between
them.

Requests for offers do not use HTTP, and events do not use sockets, so a test decides when each
request or event arrives. KV is transferred by real transports.
"""

import copy
import queue
import random
import threading
import time
from concurrent.futures import Future

import torch

from kvcache.allocator import check_invariants
from kvcache_exchange.circuit import Circuit
from kvcache_exchange.disaggregation import CacheRank, Connector, ConnectorOptions, layouts_of_plan
from kvcache_exchange.disaggregation.offer_calls import OfferRefusedError, OfferServer
from kvcache_exchange.peers import PeerSource
from kvcache_exchange.peers import source as peer_source
from kvcache_exchange.router_events.translator import EventTranslator
from kvcache_exchange.router_events.wire import WireRemoved
from kvcache_serve.engine import Engine, SamplingParams
from kvcache_serve.engine.transformers import attach
from tests.machinery.dense_models import dense, greedy

FAULTS = (None, "refuses", "is down", "is slow", "sends nonsense", "loses blocks", "offers nothing")


class _Watch:
    """A watch that always reports its peer as compatible."""

    error = None

    def __init__(self, server, view, check, recheck_s):
        self.server = server

    def stop(self):
        pass

    join = stop


class Peer:
    """An engine of the fleet."""

    def __init__(self, fleet, number, **options):
        self.fleet, self.address = fleet, f"127.0.0.1:{number + 1}"
        self.model, self.weights = fleet.model, 0
        if len(fleet.models) > 1:
            self.model = copy.deepcopy(fleet.model)
        paged = attach(
            *(self.model, fleet.budget),
            **{"max_model_len": 192, "max_num_batched_tokens": 64, "max_num_seqs": 4},
            **{"num_preallocate_tokens": 0, "enable_events": True, **fleet.cache_options},
        )
        cache, name = paged.cache, f"peer{number}"
        layouts = layouts_of_plan(cache.plan, cache.storages, engine_id=name)
        own = ConnectorOptions(transport="tcp", timeout_s=5)
        self.rank = CacheRank(layouts, cache.storages, options=own)
        self.connector = Connector(cache.manager, [self.rank], engine_id=name, options=own)
        others = [f"127.0.0.1:{i + 1}" for i in range(fleet.size) if i != number]
        self.source = PeerSource(cache.manager, self.connector, others, **fleet.source_options)
        self.engine = Engine(paged, sources=[self.source])
        self.translator = EventTranslator(cache.manager.options.hash_seed)
        self.fault, self.is_dead = None, False
        self.asks = queue.SimpleQueue()

    def step(self):
        if self.engine.is_busy:
            self.engine.step()
        self.publish()

    def publish(self):
        """Pass this engine's events to all peers. If `fleet.lies` is set, omit the removals of
        blocks.
        """
        events = self.translator.translate(self.engine.drain_events())
        if self.fleet.lies:
            events = [each for each in events if not isinstance(each, WireRemoved)]
        for other in self.fleet.peers:
            if other is not self:
                other.source._index.view(self.address).apply(events)

    def serve_asks(self):
        """Answer the requests for offers that have arrived, in the engine's thread."""
        while not self.asks.empty():
            body, future = self.asks.get()
            if self.fault == "loses blocks":
                self.engine.cache.manager.cache.reset()
            try:
                offer = self.source.offer(
                    body["prompt"],
                    min_tokens=body["min_tokens"],
                    cache_salt=body.get("cache_salt"),
                )
                future.set_result({"offer": offer})
            except Exception as error:
                future.set_exception(error)

    def new_weights(self, number, version):
        """Compute with the weights of this number from now on, under this name."""
        cache = self.engine.cache.manager.cache
        if version is not None and version == cache.model_version:
            return
        self.model.load_state_dict(self.fleet.models[number].state_dict())
        self.weights = number
        cache.start_epoch(version)

    def die(self):
        """End the engine as if its process had been killed."""
        self.is_dead, self.fault = True, "is down"
        self.rank.close()


def other_weights(model, seed):
    """Return a copy of a model with other weights, whose answers differ."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in other.parameters():
            if each.dim() == 2:
                each.add_(torch.randn(each.shape, generator=generator) * each.std())
    return other


class Fleet:
    """Peers, random requests to these peers, and the expected answer to each request."""

    def __init__(
        self, size, seed, monkeypatch, *, model="llama", budget="256KiB", num_weights=1, **options
    ):
        self.size, self.rng, self.model = size, random.Random(seed), dense(model, 2)
        # One model for each of the weights between which the peers change. Without changes, all
        # peers share one model.
        self.models = [self.model, *(other_weights(self.model, i) for i in range(1, num_weights))]
        self.budget, self.lies, self.cache_options = budget, False, options.pop("cache", {})
        self.source_options = {"min_tokens": 16, "timeout_s": 5.0, "lease_s": 5.0}
        self.source_options |= {"max_kept_share": 0.6, **options}
        self.goes_on = threading.Event()  # slow replies wait for this event
        self.answers, self.running, self.num_compared = {}, [], 0
        monkeypatch.setattr(peer_source, "PeerWatch", _Watch)
        fleet = self
        monkeypatch.setattr(
            *(OfferServer, "fetch"), lambda server, path, body: fleet._fetch(server, body)
        )
        self.peers = []
        for number in range(size):
            self.peers.append(Peer(self, number))
        for peer in self.peers:
            for server in [watch.server for watch in peer.source._watches.values()]:
                server.circuit = Circuit(num_failures=1_000)

    def _fetch(self, server, body):
        (peer,) = [each for each in self.peers if each.address == server.address]
        if peer.fault == "refuses":
            raise OfferRefusedError("not for you")
        if peer.fault == "sends nonsense":
            return {"offer": {"version": 9}}
        if peer.fault == "offers nothing":
            return {"offer": None}
        if peer.fault == "is slow":
            self.goes_on.wait(20)
        if peer.fault == "is down" or peer.is_dead:
            raise ConnectionRefusedError
        future = Future()
        peer.asks.put((body, future))
        return future.result(20)

    def right(self, prompt, num_tokens, weights=0):
        key = (*prompt, num_tokens, weights)
        if key not in self.answers:
            self.answers[key] = greedy(self.models[weights], list(prompt), num_tokens)
        return self.answers[key]

    def add(self, peer, prompt, num_tokens=2):
        params = SamplingParams(max_tokens=num_tokens)
        epoch = peer.engine.cache.manager.cache.epoch
        self.running.append((peer, peer.engine.add(prompt, params), prompt, epoch))

    def turn(self):
        """Run a step of each engine, and answer requests for offers."""
        for peer in self.peers:
            if not peer.is_dead:
                peer.serve_asks()
                peer.step()
        for each in [each for each in self.running if each[1].is_finished]:
            self.running.remove(each)
            peer, generation, prompt, epoch = each
            tokens = generation.samples[0].token_ids
            is_pure = epoch == peer.engine.cache.manager.cache.epoch
            if generation.samples[0].finish_reason == "length" and is_pure:
                right = self.right(prompt, len(tokens), peer.weights)
                assert tokens == right, (peer.address, prompt)
                self.num_compared += 1

    def answer(self, peer, prompt, num_tokens=2):
        """Serve one request to the end."""
        self.add(peer, prompt, num_tokens)
        until = time.monotonic() + 30
        while self.running:
            assert time.monotonic() < until, "a request waits forever"
            self.turn()

    def settle(self):
        """Serve all requests, and check that no engine holds a block."""
        self.goes_on.set()
        until = time.monotonic() + 60
        alive = [peer for peer in self.peers if not peer.is_dead]
        self.running = [each for each in self.running if not each[0].is_dead]
        while self.running or any(peer.engine.is_busy for peer in alive):
            assert time.monotonic() < until, "an engine stays busy"
            self.turn()
        for peer in alive:
            manager = peer.engine.cache.manager
            check_invariants(manager)
            assert manager.pool.num_free == manager.pool.num_total and manager.pool.num_kept == 0

    def close(self):
        self.goes_on.set()
        for peer in self.peers:
            if not peer.is_dead:
                peer.source.close()

    def run(self, num_turns):
        """Serve random requests that share prefixes, with random faults."""
        rng = self.rng
        prefixes = [[rng.randrange(1, 500) for _ in range(120)] for _ in range(3)]
        for turn in range(num_turns):
            alive = [peer for peer in self.peers if not peer.is_dead]
            if rng.random() < 0.2:
                self.goes_on.set()
                rng.choice(alive).fault = rng.choice(FAULTS)
                self.goes_on = threading.Event()
            if rng.random() < 0.1:
                self.lies = not self.lies
            if len(alive) == self.size and rng.random() < 0.5 / num_turns:
                rng.choice(alive).die()
                continue
            if rng.random() < 0.3 and len(self.running) < 8:
                prompt = rng.choice(prefixes)[: rng.randrange(20, 120)]
                self.add(rng.choice(alive), prompt + [turn + 1], rng.randrange(1, 4))
            if self.running and rng.random() < 0.05:
                peer, generation, *_ = rng.choice(self.running)
                if not peer.is_dead:
                    peer.engine.abort(generation.request_id)
            self.turn()
            if len(self.models) > 1 and rng.random() < 0.08:
                number = rng.randrange(len(self.models))
                version = None if rng.random() < 0.1 else f"weights {number}"
                for peer in alive if rng.random() < 0.5 else [rng.choice(alive)]:
                    peer.new_weights(number, version)
            if rng.random() < 0.2:
                time.sleep(0.002)
        for peer in self.peers:
            if not peer.is_dead:
                peer.fault = None
        self.settle()
