# SPDX-License-Identifier: Apache-2.0
"""An in-memory store with injected faults, and an engine with real pages that uses such a store
through a tier.
"""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections import OrderedDict

import numpy as np

from kvcache import Admit, External, KVCacheManager, Request, Status, StepReport
from kvcache.allocator import check_invariants
from kvcache.events import BlockRemoved
from kvcache_exchange.store import BlockStore, Circuit, StoreTier
from kvcache_exchange.store.value_format import BlockKey, key_of_text
from kvcache_lab.content import mix64, prefix_keys
from kvcache_lab.running import Running, Span
from kvcache_lab.verifier import KVVerifier
from kvcache_lab.workload import WorkloadRequest

FAULTS = ("missing", "corrupt", "short", "other", "raises", "slow", "full")


class MemoryStore(BlockStore):
    """A dictionary-based LRU store. `fault` returns the kind of the next fault.

    A slow call takes `slow_s` seconds, or less if `goes_on` is set.
    """

    knows_keys = True

    def __init__(self, capacity=1 << 30, fault=lambda: None, slow_s=0.03):
        self.values: OrderedDict[str, np.ndarray] = OrderedDict()
        self.capacity, self.fault, self.slow_s = capacity, fault, slow_s
        self.evicted: list[str] = []
        self.is_closed = False
        self.num_opened = 0
        self.goes_on = threading.Event()

    def _begin(self):
        fault = self.fault()
        if fault == "raises":
            raise OSError("the store is broken")
        if fault == "slow":
            self.goes_on.wait(self.slow_s)
        return fault

    def open(self, memory, value_bytes):
        self._begin()
        self.num_opened += 1

    def exists(self, keys):
        self._begin()
        return [key in self.values for key in keys]

    def put(self, keys, values):
        if self._begin() == "full":
            return [False] * len(keys)
        for key, value in zip(keys, values):
            self.values[key] = value.copy()
            while len(self.values) > self.capacity:
                self.evicted.append(self.values.popitem(last=False)[0])
        return [key in self.values for key in keys]

    def get(self, keys, values):
        fault, sizes = self._begin(), []
        if fault == "missing":  # the value is evicted after the lookup
            self.remove(keys)
        for key, value in zip(keys, values):
            kept = self.values.get(key)
            if kept is None:
                sizes.append(-1)
                continue
            value[:] = kept
            sizes.append(len(kept))
        if fault == "corrupt" and values:
            values[-1][len(values[-1]) // 2] ^= 1
        if fault == "short" and sizes:
            sizes[0] -= 1
        if fault == "other" and len(values) > 1:
            values[0][:], values[1][:] = values[1].copy(), values[0].copy()
        return sizes

    def remove(self, keys):
        for key in keys:
            if self.values.pop(key, None) is not None:
                self.evicted.append(key)

    def keys(self):
        return [*self.values]

    def take_evicted(self):
        evicted, self.evicted = self.evicted, []
        return [key for key in evicted if key not in self.values]

    def close(self):
        self.is_closed = True


class StoreUser:
    """An engine that loads prefixes from the store and computes the remaining tokens.

    Every token that is read is checked.

    At most `concurrency` rows run at a time. Each step is computed and reported before the next one
    is planned.
    """

    def __init__(
        self, store, groups, *, num_blocks=41, num_host_blocks=0, concurrency=4, timeout_s=10.0,
        staging_blocks=8, announce=True, circuit=None, write_from="auto", model="tiny", device="cpu",
        **options,
    ):  # fmt: skip
        self.manager = KVCacheManager.for_groups(
            groups, num_blocks, 256, num_preallocate_tokens=0, enable_events=True,
            num_host_blocks=num_host_blocks, max_num_reqs=concurrency, **options,
        )  # fmt: skip
        self.store, self.staging_blocks = store, staging_blocks
        self.verifier = self.make_verifier(
            groups=groups, num_blocks=num_blocks, num_host_blocks=num_host_blocks,
            max_num_reqs=concurrency, num_kv_heads=1, device=device,
        )  # fmt: skip
        self.tier = self.make_tier(
            {"announce": announce, "write_from": write_from},
            {"model": model, "timeout_s": timeout_s, "circuit": circuit},
        )
        self.concurrency = concurrency
        self.waiting: list[Running] = []
        self.running: dict[str, Running] = {}
        self.receiving: dict[str, Running] = {}
        self.events = []
        self.has_local_hit = {}  # whether requests had a local hit before their load
        self.num_hit = self.num_loaded = self.num_finished = 0
        self.numbers = itertools.count(1)
        self.factors = [group.factors for each in self.verifiers for group in each.groups]

    @property
    def verifiers(self):
        return [self.verifier]

    def make_verifier(self, **sizes):
        return KVVerifier(num_layers=2, **sizes)

    def make_tier(self, of_tier, of_rank):
        host = self.verifier._host if of_tier["write_from"] in ("auto", "host") else None
        given = {**of_tier, **of_rank, **self.of_verifier(self.verifier), "host_pages": host}
        return StoreTier(self.manager, self.verifier.storage.pages, self.store, **given)

    def of_verifier(self, verifier):
        staging_bytes = self.staging_blocks * (verifier.storage.pages.page_bytes + 192)
        return {"contents": verifier.storages, "staging_bytes": staging_bytes}

    def add(self, tokens, **options):
        tokens, number = np.array(tokens, np.int32), next(self.numbers)
        item = WorkloadRequest(number, number, tokens, 1, prefix_keys(tokens))
        self.verifier.reserve(item.num_tokens)
        self.waiting.append(Running(item, Request(str(number), tokens, **options), 0))

    def run(self, *prompts, timeout_s=60.0):
        """Serve requests until all have finished."""
        for tokens in prompts:
            self.add(tokens)
        deadline = time.monotonic() + timeout_s
        while self.waiting or self.running or self.receiving:
            assert time.monotonic() < deadline, "a request hangs"
            self.step()
            for each in [*self.running.values()]:
                if not each.num_left:
                    self.finish(each)

    def step(self, chunk=32):
        """Process completed loads, and then run a step with all rows and the first waiting request."""
        for received in self.tier.poll():
            running = self.receiving.pop(received.request.request_id)
            running.num_computed = running.num_hit = received.num_computed_tokens
            self.running[received.request.request_id] = running
            self.num_loaded += received.num_loaded_tokens
        rows = [each for each in self.running.values() if each.num_left]
        counts = [
            self.manager.checkpoint_tokens(each.request, min(chunk, each.num_left)) for each in rows
        ]
        admitted, new = [], None
        num_held = len(self.running) + len(self.receiving)
        if self.waiting and num_held < self.concurrency:
            external = self.tier.match(self.waiting[0].request)
            if external is not None:
                new = self.waiting[0]
                count = self.manager.checkpoint_tokens(new.request, chunk)
                admitted = [Admit(new.request, count)]
                if external:
                    admitted = [Admit(new.request, external=External(external, delayed=True))]
        plan = self.manager.step([each.row for each in rows], counts, new=admitted)
        served = []
        starts, status = plan.num_computed_tokens.tolist(), plan.status.tolist()
        for running, count, start, answer in zip(rows, counts, starts, status):
            if answer == Status.SERVED:
                running.num_computed = start + count
                served.append((running, start))
        if new is not None and status[-1] == Status.SERVED:
            self.waiting.pop(0)
            new.row = int(plan.rows[-1])
            new.num_hit = starts[-1]
            self.num_hit += starts[-1] - external
            self.has_local_hit[new.request.request_id] = starts[-1] > external
            if external:
                self.receiving[new.request.request_id] = new
            else:
                new.num_computed = self.manager.num_computed_tokens(new.request)
                self.running[new.request.request_id] = new
                served.append((new, starts[-1]))
        stuck = [r for r, answer in zip(rows, status) if answer != Status.SERVED]
        self.verifier.apply(plan)
        if new is not None and status[-1] == Status.SERVED and external:
            self.tier.begin(new.request)
        spans = [self.span(running, start) for running, start in served]
        self.check(self.verifier.check_arrival, spans)
        for span in spans:
            self.verifier.write(span)
        self.check(self.verifier.check, spans)
        report = StepReport(plan.step_id, completed=True)
        self.manager.report(report)
        self.tier.save(report)
        self.events += self.tier.drain_events()
        if stuck and not served:  # the stuck request restarts once other requests have finished
            self.manager.free(stuck[0].request)
            self.running.pop(stuck[0].request.request_id)
            self.waiting.append(Running(stuck[0].item, stuck[0].request, 0))
        return plan

    def span(self, running, start):
        tables = [
            self.manager.block_ids(running.request, g) for g in range(len(self.manager.groups))
        ]
        return Span(running.item, running.row, tables, start, running.num_computed, running.num_hit)

    def match(self, request):
        """Wait for the lookup of a request, or of a prompt, and return the number of tokens found."""
        if not isinstance(request, Request):
            request = Request("probe", request)
        while (found := self.tier.match(request)) is None:
            time.sleep(0.001)
        return found

    def until(self, condition, timeout_s=60.0):
        """Poll until a condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.tier.stats
            self.tier.poll()
            time.sleep(0.001)

    @property
    def told(self):
        """Return the store's contents, according to the events with medium "storage"."""
        self.events += self.tier.drain_events()
        has = set()
        for event in (each for each in self.events if each.medium == "storage"):
            keys = {BlockKey(event.group, each.tobytes()) for each in event.block_hashes}
            has = has - keys if isinstance(event, BlockRemoved) else has | keys
        return has

    @property
    def held(self):
        """Return the blocks that the stores of all ranks have."""
        return set.intersection(*(
            {key for text in store.values if (key := key_of_text(rank._fingerprint, text))}
            for rank, store in self.ranks()
        ))  # fmt: skip

    def ranks(self):
        """Return each rank with its store."""
        return [(rank, self.store) for rank in self.tier._ranks]

    def serve(self, choose, number, *, before_step=lambda: None, **rates):
        """Serve random requests with common prefixes. Some are canceled, lose blocks, or are
        interrupted by a reset or by new weights.
        """
        rates = {"cancel": 0.1, "invalidate": 0.05, "reset": 0.03, "new_weights": 0.02, **rates}
        families = [[choose.randrange(1000) for _ in range(60)] for _ in range(4)]
        for _ in range(number):
            head = choose.choice(families)[: choose.randint(1, 50)]
            tail = [choose.randrange(1000) for _ in range(choose.randint(1, 8))]
            self.add([*head, *tail])
            for _ in range(choose.randint(1, 6)):
                before_step()
                self.step(chunk=choose.choice([8, 16, 64]))
                check_invariants(self.manager)
                for each in [*self.running.values()]:
                    if not each.num_left and choose.random() < 0.7:
                        self.finish(each)
                if self.receiving and choose.random() < rates["cancel"]:
                    self.cancel(choose.choice([*self.receiving.values()]))
                if self.running and choose.random() < rates["invalidate"]:
                    blocks = self.manager.block_ids(choose.choice([*self.running.values()]).request)
                    self.restart(self.tier.invalidate(blocks[blocks > 0][-2:]))
                if choose.random() < rates["reset"]:
                    self.manager.cache.reset()
                if choose.random() < rates["new_weights"]:
                    self.new_weights(choose.choice([None, "a", "b"]))
                if choose.random() < 0.3:
                    time.sleep(0.002)

    @staticmethod
    def check(how, spans):
        for span in spans:
            count, first = how(span)
            assert count == 0, first

    def finish(self, running):
        """Check all KV that the request holds once more, and free the request."""
        self.check(self.verifier.check, [self.span(running, running.num_computed)])
        self.manager.free(running.request)
        del self.running[running.request.request_id]
        self.num_finished += 1

    def cancel(self, running):
        """Cancel a request whose KV is being loaded."""
        self.tier.cancel(running.request)
        del self.receiving[running.request.request_id]

    def new_weights(self, version=None):
        """Compute other KV from the same tokens from now on. Requests that have KV start anew."""
        if version is not None and version == self.manager.cache.model_version:
            return
        self.manager.cache.start_epoch(version)
        for each in [*self.running.values()]:
            self.manager.free(each.request)
            self.waiting.append(Running(each.item, each.request, 0))
        self.running.clear()
        for name in [name for name in self.receiving if self.has_local_hit[name]]:
            running = self.receiving[name]
            self.cancel(running)
            self.waiting.append(Running(running.item, running.request, 0))
        seed = np.uint64(zlib.crc32(self.manager.cache.model_version.encode()))
        mixed = mix64(np.array([seed])) | np.uint64(1)
        groups = [group for each in self.verifiers for group in each.groups]
        for group, factors in zip(groups, self.factors):
            group.factors = factors * mixed

    def restart(self, affected):
        """Record that rows continue from earlier positions."""
        for name, start in affected.items():
            if name in self.running:
                self.running[name].num_computed = self.running[name].num_hit = start

    def settle(self):
        """Run empty steps until no put is pending. Blocks are written to the host one step after
        they are filled, so at least two steps are run.
        """
        deadline, num_steps = time.monotonic() + 60, 0
        while self.tier.is_busy or num_steps < 2:
            assert time.monotonic() < deadline, self.tier.stats
            plan = self.manager.step()
            self.verifier.apply(plan)
            report = StepReport(plan.step_id, completed=True)
            self.manager.report(report)
            self.tier.save(report)
            self.tier.poll()
            num_steps += 1
            time.sleep(0.001)
        self.events += self.tier.drain_events()

    def end(self):
        """End all requests, and check that nothing remains of them."""
        for each in [*self.receiving.values()]:
            self.cancel(each)
        for each in [*self.running.values()]:
            self.manager.free(each.request)
        self.running.clear()
        ranks = self.ranks()  # `close` may forget them
        assert self.tier.close(60)
        for rank, store in ranks:
            assert getattr(store, "is_closed", True)
            assert rank._staging.num_free == rank._staging.num_values
        for pool in filter(None, (self.manager.pool, self.manager.host_pool)):
            assert pool.num_free == pool.num_total
        check_invariants(self.manager)
        assert self.tier.num_loading_requests == 0
        self.events += self.tier.drain_events()


def patient() -> Circuit:
    """Return a circuit breaker that retries quickly."""
    return Circuit(num_failures=2, retry_s=0.005, max_retry_s=0.02)
