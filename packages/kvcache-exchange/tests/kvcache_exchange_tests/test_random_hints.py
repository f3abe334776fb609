# SPDX-License-Identifier: Apache-2.0
"""Random hints among random requests, on the real scheduler and manager, checked by a model of the
bytes.

The model knows the content of each slot on the device, the host and a store. Before a sequence
computes a token, all earlier tokens must be in its blocks. Thus a hint that moves wrong bytes, or
caches a token that was never computed, is found.
"""

import random
from collections import Counter

import numpy as np
import pytest

from kvcache import Admit, GroupSpec, KVCacheManager, Request, StepReport
from kvcache.allocator import check_invariants
from kvcache.sources import LoadStats
from kvcache.sources.loads import SourceLoads
from kvcache.step import Status
from kvcache_exchange.hints import Hint, HintExecutor, limits
from kvcache_exchange.store.prefixes import StoredPrefixes
from kvcache_serve.engine import Scheduler, Sequence, State

WINDOW = [
    GroupSpec("full_attention", 4),
    GroupSpec("sliding_window", 4, {"window": 8}),
]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Let deadlines pass while a run lasts."""
    monkeypatch.setattr(limits, "SHARE", 0.3)
    monkeypatch.setattr(limits, "TTL_S", 3.0)
    monkeypatch.setattr(limits, "MAX_TTL_S", 8.0)
    monkeypatch.setattr(limits, "PREFETCH_TIMEOUT_S", 6.0)


CONFIGS = {
    "host": {"num_host_blocks": 40},
    "store": {},
    "all": {"num_host_blocks": 24, "eviction": "priority", "host_write": "through"},
    "partial": {"num_host_blocks": 30, "hash_block_size": 1},
    "partial store": {"num_host_blocks": 30, "hash_block_size": 1},
    "window": {"num_host_blocks": 40, "groups": WINDOW},
    "learned": {"num_host_blocks": 30, "eviction": "learned"},
}


def keys_of(tokens, salt=None):
    """Return one key per token, which identifies the prefix up to the token."""
    keys, key = [], hash(salt)
    for token in tokens:
        key = hash((key, int(token)))
        keys.append(key)
    return keys


class Store:
    """A source whose lookups and loads take a random number of polls, and sometimes fail."""

    name = "store"
    is_busy = False
    num_quarantined_blocks = 0

    def __init__(self, manager, rng, pages):
        self.manager, self.rng, self.pages = manager, rng, pages
        self.stats = LoadStats()
        self.loads = SourceLoads(manager, self.stats)
        self.prefixes = StoredPrefixes(manager)
        self.blocks = {}  # BlockKey -> content of the block

    def match(self, request):
        if self.rng.random() < 0.3:
            return None
        first = self.prefixes.hit_tokens(request)
        keys = self.prefixes.candidates(request, first) if request.read_cache else []
        found = [key for key in keys if key in self.blocks]
        stop = self.prefixes.reach(request, first, found)
        if stop <= first or request in self.loads:
            self.loads.forget(request.request_id)
            return 0
        self.loads.match(request, first, stop, self.rng.randrange(4))
        return stop - first

    def begin(self, request):
        self.loads.begin(self.loads.admitted(request))

    def poll(self):
        arrived = []
        for load in self.loads.under_way:
            load.detail -= 1
            if load.detail > 0:
                continue
            stop, error = load.end_token, None
            if self.rng.random() < 0.2:
                stop, error = load.first_token, "it is broken"
            for block in self.prefixes.needed(load.request, load.first_token, stop):
                page = self.manager.block_ids(load.request, block.key.group)[block.column]
                if page > 0:
                    self.pages[page] = list(self.blocks[block.key])
            arrived.append(self.loads.finish(load, stop - load.first_token, error))
        return arrived

    def cancel(self, request):
        self.loads.forget(request.request_id)
        if request in self.loads:
            self.loads.finish(self.loads[request.request_id], 0, "canceled")
        self.loads.free(request)

    def save(self, report):
        pass

    def close(self):
        pass

    @property
    def num_loading_requests(self):
        return len(self.loads)


class World:
    def __init__(self, seed, name):
        self.rng, self.now = random.Random(seed), 0.0
        options = dict(CONFIGS[name])
        groups = options.pop("groups", [GroupSpec("full_attention", 4)])
        self.manager = KVCacheManager.for_groups(
            groups,
            self.rng.choice([14, 22, 40]),
            96,
            num_preallocate_tokens=0,
            max_num_reqs=self.rng.choice([3, 6]),
            enable_events=True,
            **options,
        )
        self.device, self.host = {}, {}
        sources = []
        if name in ("store", "all", "window", "partial store"):
            sources.append(Store(self.manager, self.rng, self.device))
        self.sources = sources
        self.scheduler = Scheduler(self.manager, max_num_batched_tokens=32, sources=sources)
        self.hints = HintExecutor(self.manager, sources=sources, clock=lambda: self.now)
        self.scheduler.hints = self.hints
        self.prefixes = [self.tokens(self.rng.randrange(8, 60)) for _ in range(5)]
        self.pending, self.receipts = [], Counter()
        self.pins = {}  # key -> deadline
        self.num_added, self.waits = 0, Counter()

    def tokens(self, count):
        return [self.rng.randrange(6) for _ in range(count)]

    def prefix(self):
        of = self.rng.choice(self.prefixes)
        return of[: self.rng.randrange(1, len(of) + 1)]

    # Operations.

    def add(self):
        tokens = (self.prefix() + self.tokens(self.rng.randrange(1, 9)))[:80]
        self.prefixes[self.rng.randrange(5)] = tokens
        self.num_added += 1
        end = len(tokens) + self.rng.randrange(1, 6)
        request = Request(f"r{self.num_added}", tokens)
        self.scheduler.add(Sequence(request, (0, self.num_added), max_tokens=end))

    def hint(self):
        intent = self.rng.choice(["prefetch", "prefetch", "pin"])
        tokens = self.prefix()
        more = {}
        if self.rng.random() < 0.5:
            more["ttl_s"] = self.rng.choice([0.5, 2, 50])
        if intent == "pin" and self.rng.random() < 0.5:
            more["session"] = self.rng.choice("ab")
        if self.rng.random() < 0.3:
            more["num_tokens"] = self.rng.randrange(1, 70)
        request, hint = Request("of", tokens), Hint(intent=intent, **more)
        told = lambda receipt: self.check_receipt(tokens, hint, receipt)  # noqa: E731
        pending = self.hints.submit(request, hint, on_receipt=told)
        if pending.receipt is None:
            self.pending.append(pending)

    def check_receipt(self, tokens, hint, receipt):
        self.receipts[receipt.intent, receipt.status] += 1
        assert receipt.num_tokens <= receipt.num_asked_tokens
        if receipt.intent == "prefetch" and receipt.num_tokens:
            cached = self.manager.cache.cached_tokens(Request("q", [*tokens, 0]))
            assert cached.on_device >= receipt.num_tokens
        if receipt.intent == "pin" and receipt.num_tokens:
            assert 0 < receipt.ttl_s <= limits.MAX_TTL_S

    def store_blocks(self):
        """Put all cached device blocks into the store, as a tier does."""
        ids = np.arange(1, self.manager.pool.num_blocks)
        found = self.manager.cache.hashes_of(ids)
        for source in self.sources:
            for page, hashed, group in zip(ids.tolist(), found.hashes, found.groups.tolist()):
                if group >= 0 and page in self.device and self.rng.random() < 0.7:
                    key = source.prefixes._key([hashed] * 1000, group, 0)
                    source.blocks[key] = list(self.device[page])

    def evict(self):
        ids = np.arange(1, self.manager.pool.num_blocks)
        ids = ids[self.manager.pool.ref_counts(ids) == 0]
        self.manager.cache.evict(self.rng.sample(ids.tolist(), len(ids) // 2))

    def step(self):
        step = self.scheduler.schedule()
        if step is None:
            self.check_starved()
            return
        if self.rng.random() < 0.05:
            self.scheduler.fail(step)
            return
        self.apply(step.plan)
        self.scheduler.begin_loads(step)
        for sequence, start, tokens in zip(step.sequences, step.starts.tolist(), step.token_ids):
            self.compute(sequence, start, len(tokens))
        self.scheduler.complete(step)
        for sequence, count in zip(step.sequences, step.num_logits.tolist()):
            if count:
                self.scheduler.accept(sequence, self.tokens(1))
                if sequence.request.num_tokens >= sequence.max_tokens:
                    self.scheduler.finish(sequence)
        for sequence in step.refused:
            assert sequence.state is State.FINISHED
        self.check_starved()

    def apply(self, plan):
        before = {page: list(content) for page, content in self.device.items()}
        for page, to in plan.swap_out.tolist():
            self.host[to] = before.get(page, [])
        for page, to in plan.copy.tolist():
            self.device[to] = list(self.device.get(page, []))
        for page, to in plan.swap_in.tolist():
            self.device[to] = list(self.host[page])

    def leave_on_host(self, tokens=None):
        """Swap out a request with a cached prefix, and evict the prefix's device blocks."""
        manager, tokens = self.manager, self.prefix() if tokens is None else tokens
        request = Request("leaving", [*tokens[: len(tokens) // 4 * 4], 0], write_cache=False)
        plan = manager.step(new=[Admit(request, 1)])
        self.apply(plan)
        manager.report(StepReport(plan.step_id, True))
        if plan.answers.new.status.tolist() != [Status.SERVED]:
            return
        if manager.host_pool is not None:
            plan = manager.step(swap_out=[manager.row(request)])
            self.apply(plan)
            manager.report(StepReport(plan.step_id, True))
        manager.free(request)
        found = manager.cache.find(manager.cache.hashes(request)).device
        found = found[found > 0]
        manager.cache.evict(found[manager.pool.ref_counts(found) == 0])

    def compute(self, sequence, start, count):
        keys = keys_of(sequence.request.token_ids)
        for group, spec in enumerate(self.manager.groups):
            table = self.manager.block_ids(sequence.request, group).tolist()
            first = 0
            if spec.kind == "sliding_window":
                first = max(start - spec.options["window"] + 1, 0)
            for position in range(first, start):
                page, slot = table[position // 4], position % 4
                content = self.device.get(page, [])
                assert len(content) > slot and content[slot] == keys[position], (
                    f"{sequence.request} position {position} of {start}, group {group}, page {page}"
                )
            for position in range(start, start + count):
                page = table[position // 4]
                content = self.device.setdefault(page, [])
                content += [None] * (4 - len(content))
                content[position % 4] = keys[position]

    # Invariants.

    def check(self):
        check_invariants(self.manager)
        hints, total = self.hints, self.manager.pool.num_total
        for ledger in (hints._pins.ledger, hints._prefetched):
            used = sum(each.num_blocks for each in ledger.entries.values())
            assert used <= int(limits.SHARE * total) == ledger.most
        assert self.manager.pool.num_pinned <= int(limits.SHARE * total)
        assert hints.num_rows <= limits.MAX_ACTIVE
        hints.expire()
        assert hints.stats.used_tokens + hints.stats.unused_tokens <= hints.stats.prefetched_tokens
        live = [each for each in hints._pins.ledger.entries.values() if each.deadline > self.now]
        assert len(live) == len(hints._pins.ledger.entries)
        if not live:
            assert self.manager.pool.num_pinned == 0
        self.pending = [each for each in self.pending if each.receipt is None]
        assert len(self.pending) == hints.num_pending

    def check_starved(self):
        """Count the steps in which a sequence waited while a hint held a row."""
        for sequence in self.scheduler.waiting:
            self.waits[sequence] += self.hints.num_rows > 0 and not self.scheduler.admitted
            assert self.waits[sequence] < 12, f"{sequence.request} starves"

    def settle(self):
        for _ in range(3000):
            if not (self.scheduler.num_unfinished or self.hints.num_pending):
                break
            self.now += 0.05
            self.step()
            self.check()
        assert not (self.scheduler.num_unfinished or self.hints.num_pending)
        self.now += 10
        self.check()
        pool = self.manager.pool
        assert (pool.num_free, pool.num_pinned, pool.num_kept) == (pool.num_total, 0, 0)
        if self.manager.host_pool is not None:
            assert self.manager.host_pool.num_free == self.manager.host_pool.num_total


def run(seed, name, num_operations):
    world = World(seed, name)
    weights = {"step": 10, "add": 2, "hint": 4, "store_blocks": 1, "evict": 0.5, "leave_on_host": 1}
    for _ in range(num_operations):
        world.now += world.rng.choice([0, 0.01, 0.3])
        (operation,) = world.rng.choices([*weights], [*weights.values()])
        getattr(world, operation)()
        world.check()
    world.settle()
    return world


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_random_hints_move_right_bytes_within_limits(name):
    receipts, num_prefetched = Counter(), 0
    for seed in range(4):
        world = run(seed, name, 150)
        receipts += world.receipts
        num_prefetched += world.hints.stats.prefetched_tokens
    for intent in ("prefetch", "pin"):
        assert receipts[intent, "done"] + receipts[intent, "partly"]
    assert num_prefetched


def test_the_slot_after_a_hit_is_never_cached():
    # In this run, a hint's load would cache the token after its hit, which is never computed.
    run(101, "partial store", 300)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONFIGS)
def test_many_random_hints_move_right_bytes_within_limits(name):
    for seed in range(100, 200):
        run(seed, name, 400)


def test_a_failed_step_frees_the_rows_of_its_hints():
    world = World(7, "host")
    request = Request("r", range(13))
    plan = world.manager.step(new=[request])
    world.manager.report(StepReport(plan.step_id, True))
    world.manager.free(request)
    world.leave_on_host(list(range(12)))
    pending = world.hints.submit(Request("q", range(13)), Hint(intent="prefetch"))
    for _ in range(3):
        step = world.scheduler.schedule()
        assert world.hints.num_rows == 1
        world.scheduler.fail(step)
        assert world.hints.num_rows == 0
        check_invariants(world.manager)
    while pending.receipt is None:
        world.scheduler.complete(world.scheduler.schedule())
    assert (pending.receipt.status, pending.receipt.num_tokens) == ("done", 12)
