# SPDX-License-Identifier: Apache-2.0
"""Engines that exchange KV while the weights of each of them change at random.

Every page remembers what it holds: a token's content is a digest of the version of the weights and of
all tokens up to it. Transfers take place at random moments, and leases are real.
"""

import hashlib
import itertools
import json
import random
from collections import defaultdict

import numpy as np

from kvcache import Admit, External, GroupSpec, KVCacheManager, Request, Status, StepReport
from kvcache.allocator import check_invariants
from kvcache.transfer.description import CacheDescription
from kvcache_exchange.disaggregation import Connector
from kvcache_exchange.disaggregation.layout import GroupLayout
from kvcache_exchange.disaggregation.leases import Leases, done_message, is_lease_over
from kvcache_exchange.disaggregation.offer import RankAddress
from kvcache_exchange.disaggregation.steps import RankHandshake, Results

BLOCK, LENGTH = 4, 256
GROUPS = {
    "full": [GroupSpec("full_attention", BLOCK)],
    "window": [
        GroupSpec("full_attention", BLOCK),
        GroupSpec("sliding_window", BLOCK, {"window": 9}),
    ],
}


def content(version, tokens, position):
    digest = hashlib.blake2b(repr(version).encode(), digest_size=8)
    digest.update(np.asarray(tokens[: position + 1], np.int64).tobytes())
    return digest.hexdigest()


class Mover:
    """A rank that copies pages from another engine of the fleet at random moments."""

    def __init__(self, engine, layouts):
        self.engine, self.leases = engine, Leases(lambda: engine.fleet.now)
        address = RankAddress("moved", "bQ==", (((0,) * 2),) * len(layouts), 0)
        self.handshake = RankHandshake(layouts, address)
        self.loads, self.results = {}, Results()

    def begin(self, step):
        for name, lease in step.leases.items():
            self.leases.begin(name, *lease)
        for name in step.ends:
            self.leases.end(name)
        for name, load in step.loads.items():
            self.loads[name] = [load, False, None]
        for name in step.cancels & set(self.loads):
            self.loads[name][2] = "it was canceled"
        for offer in step.unread:
            self.tell(offer)

    def take_results(self):
        found, self.results = self.results, Results()
        found.sent |= self.leases.ended()
        return found

    def close(self):
        pass

    def tell(self, offer):
        message = done_message(offer.request_id, offer.lease.generation, 1)
        self.engine.fleet.engines[offer.engine_id].rank.leases.note(message, self.engine.name)

    def work(self, name):
        """Advance one load: copy its pages, or check the lease and end."""
        load, is_copied, error = self.loads[name]
        sender = self.engine.fleet.engines[load.offer.engine_id]
        word = sender.rank.leases.slots[load.offer.lease.slot]
        is_over = is_lease_over(word, load.offer.lease.generation)
        if error is None and not is_copied:
            for group, (mine, theirs) in enumerate(zip(load.blocks, load.offer.blocks)):
                for column, (block, source) in enumerate(zip(mine, theirs)):
                    if block and source and (column + 1) * BLOCK > load.first_token:
                        page = dict(sender.pages[source])
                        self.engine.pages[block] = {k: v for k, v in page.items() if k[0] == group}
            self.loads[name][1] = True
            return
        if error is None and is_over:
            error = "the lease has ended"
        if error is None:
            self.results.received.add(name)
        else:
            self.results.failed[name] = error
            self.results.released.add(name)
        del self.loads[name]
        self.tell(load.offer)


class Engine:
    """One engine of the fleet. `version` names the weights with which it computes."""

    def __init__(self, fleet, name, groups):
        self.fleet, self.name, self.version = fleet, name, ""
        self.manager = KVCacheManager.for_groups(
            groups, 40 * len(groups), LENGTH, num_preallocate_tokens=0
        )
        layouts = tuple(
            GroupLayout(
                (f"layer{g}",),
                CacheDescription(
                    engine_id=name,
                    num_layers=1,
                    total_num_kv_heads=1,
                    head_size=8,
                    block_size=BLOCK,
                ),
                1,
                self.manager.pool.num_blocks,
            )
            for g in range(len(groups))
        )
        self.rank = Mover(self, layouts)
        self.connector = Connector(
            self.manager, [self.rank], engine_id=name, clock=lambda: fleet.now
        )
        self.pages = defaultdict(dict)  # page -> {(group, slot): content}
        self.running, self.loading = {}, {}

    def new_weights(self, version):
        if version is not None and version == self.manager.cache.model_version:
            return
        self.manager.cache.start_epoch(version)
        self.version = self.manager.cache.model_version

    def first_needed(self, group, end):
        options = self.manager.groups[group].options
        return max(end - options["window"] + 1, 0) if "window" in options else 0

    def compute(self, request, first, end):
        tokens = request.token_ids.tolist()
        self.check(request, first)
        for group in range(len(self.manager.groups)):
            table = self.manager.block_ids(request, group).tolist()
            for position in range(first, end):
                block, slot = table[position // BLOCK], position % BLOCK
                if block:
                    self.pages[block] = {
                        k: v for k, v in self.pages[block].items() if k[0] == group
                    }
                    self.pages[block][group, slot] = content(self.version, tokens, position)

    def check(self, request, end):
        """Check what the token after `end` tokens reads, unless weights changed under the request."""
        if self.manager.cache.is_stale(request):
            return
        tokens = request.token_ids.tolist()
        for group in range(len(self.manager.groups)):
            table = self.manager.block_ids(request, group).tolist()
            for position in range(self.first_needed(group, end), end):
                found = self.pages[table[position // BLOCK]].get((group, position % BLOCK))
                right = content(self.version, tokens, position)
                assert found == right, (self.name, request.request_id, group, position)
                self.fleet.num_read += 1

    def run(self, rows, counts, new=(), **tokens):
        plan = self.manager.step(rows, counts, new=list(new), **tokens)
        self.manager.report(StepReport(plan.step_id, completed=True))
        return plan

    def admit(self, request, offer=None):
        """Admit a request, and load what the offer has of it. Returns whether it was admitted."""
        count = 0
        if offer is not None:
            try:
                count = self.connector.match(request, offer)
            except ValueError:
                self.fleet.num_refused += 1
        if self.fleet.rng.random() < 0.02:
            self.new_weights(self.fleet.some_version())  # between the match and the step
        external = External(count, delayed=True) if count else None
        plan = self.run([], [], [Admit(request, external=external)])
        if plan.status.tolist() != [Status.SERVED]:
            self.connector.cancel(request)
            return False
        if not count:
            self.compute(request, int(plan.num_computed_tokens[0]), request.num_tokens)
            self.running[request.request_id] = request
            return True
        if self.fleet.rng.random() < 0.02:
            self.new_weights(self.fleet.some_version())  # between the step and the load
        try:
            self.connector.begin(request)
        except ValueError:
            self.connector.cancel(request)
            return False
        self.loading[request.request_id] = request
        return True

    def poll(self):
        for arrived in self.connector.poll():
            request = self.loading.pop(arrived.request.request_id)
            if arrived.num_computed_tokens is None:
                continue
            self.fleet.num_loaded += arrived.num_loaded_tokens
            left = request.num_tokens - arrived.num_computed_tokens
            plan = self.run([self.manager.row(request)], [left])
            if plan.status.tolist() != [Status.SERVED]:
                self.manager.free(request)
                continue
            self.compute(request, arrived.num_computed_tokens, request.num_tokens)
            self.running[request.request_id] = request

    def finish(self, name, publishes):
        request = self.running.pop(name)
        self.check(request, request.num_tokens)
        offer = self.connector.publish(request, lease_s=5.0) if publishes else None
        if not publishes:
            self.manager.free(request)
        return offer


class Fleet:
    """Engines, and random operations on them, among them new weights."""

    def __init__(self, seed, *, size=3, kinds="full"):
        self.rng, self.now = random.Random(seed), 0.0
        self.num_read = self.num_loaded = self.num_refused = 0
        names = [f"engine{i}" for i in range(size)]
        self.engines = {name: Engine(self, name, GROUPS[kinds]) for name in names}
        self.offers, self.numbers = [], itertools.count()
        self.families = [[self.rng.randrange(99) for _ in range(60)] for _ in range(3)]

    def some_version(self):
        return self.rng.choice([None, "a", "a", "a", "b", "b", "b"])

    def some_prompt(self):
        head = self.rng.choice(self.families)[: self.rng.randint(1, 50)]
        return [*head, self.rng.randrange(99)]

    def operate(self):
        rng, engine = self.rng, self.rng.choice([*self.engines.values()])
        what = rng.random()
        if what < 0.3:
            request, offer = Request(f"r{next(self.numbers)}", self.some_prompt()), None
            if self.offers and rng.random() < 0.7:
                tokens, offer = rng.choice(self.offers)
                request = Request(f"r{next(self.numbers)}", [*tokens, rng.randrange(99)])
            if rng.random() < 0.4 and offer is None:  # of another engine's cache
                other = rng.choice([*self.engines.values()])
                asked = Request(f"p{next(self.numbers)}", [*request.token_ids.tolist(), 0])
                offer = other.connector.publish_cached(asked, lease_s=5.0)
            engine.admit(request, json.loads(json.dumps(offer)))
        elif what < 0.5 and engine.running:
            name = rng.choice([*engine.running])
            tokens = engine.running[name].token_ids.tolist()
            offer = engine.finish(name, rng.random() < 0.7)
            if offer is not None:
                self.offers.append((tokens, offer))
                del self.offers[:-8]
        elif what < 0.72:
            if engine.rank.loads:
                engine.rank.work(rng.choice([*engine.rank.loads]))
        elif what < 0.88:
            self.now += rng.choice([0.0, 0.0, 0.1, 1.0])
            engine.poll()
        elif what < 0.9:
            version = self.some_version()
            for each in self.engines.values() if rng.random() < 0.6 else [engine]:
                each.new_weights(version)
        elif what < 0.985 and engine.running:  # a decode step
            request = engine.running[rng.choice([*engine.running])]
            row, token = [engine.manager.row(request)], [rng.randrange(99)]
            plan = engine.run(row, [1], token_ids=token)
            if plan.status.tolist() == [Status.SERVED]:
                engine.compute(request, request.num_tokens - 1, request.num_tokens)
        elif engine.loading:
            request = engine.loading.pop(rng.choice([*engine.loading]))
            engine.connector.cancel(request)

    def run(self, num_operations):
        for _ in range(num_operations):
            self.operate()
        for engine in self.engines.values():
            check_invariants(engine.manager)
        self.end()

    def end(self):
        """End all requests, loads and leases, and check that no block is held."""
        for _ in range(4):
            self.now += 100.0
            for engine in self.engines.values():
                for name in [*engine.running]:
                    engine.finish(name, publishes=False)
                for name in [*engine.rank.loads] * 2:
                    if name in engine.rank.loads:
                        engine.rank.work(name)
                engine.poll()
        for engine in self.engines.values():
            pool = engine.manager.pool
            assert not engine.loading and not engine.running and engine.connector.is_busy is False
            assert pool.num_kept == 0 and pool.num_free == pool.num_total
