# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of kvcache's host tier in vLLM, compared with a simple reference model.

No language model is needed.

These tests run in `make test-vllm` and are skipped where vLLM is not installed.
"""

import random
from collections import Counter

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from kvcache.allocator import host_eviction_names
from kvcache_vllm.offloading import HostManager, HostTierOptions
from tests.machinery.shared import seed_of_test


class PlainTier:
    """The reference model, based on plain lists. It evicts keys in the order in which they were
    released.
    """

    def __init__(self, num_chunks):
        self.num_chunks = num_chunks
        self.idle = []  # keys in eviction order
        self.loading, self.storing = set(), set()

    def state(self, key):
        if key in self.storing:
            return LookupResult.HIT_PENDING
        return LookupResult.HIT if key in self.loading | {*self.idle} else LookupResult.MISS

    def release(self, keys):
        """Move the keys to the end of the eviction order."""
        for key in keys:
            if key in self.idle:
                self.idle.remove(key)
                self.idle.append(key)

    def prepare_store(self, keys):
        """Return (keys to store, evicted keys), or None if the keys do not fit."""
        known = [key for key in keys if self.state(key) is not LookupResult.MISS]
        new = [key for key in keys if key not in known]
        self.release(known[::-1])
        unused = self.num_chunks - len(self.idle) - len(self.loading) - len(self.storing)
        others = [key for key in self.idle if key not in known]
        if len(new) > unused + len(others):
            return None
        evicted = others[: max(len(new) - unused, 0)]
        self.idle = [key for key in self.idle if key not in evicted]
        self.storing.update(new)
        return new, evicted


class Workload:
    """Runs random requests with two groups, some with a common prefix, on the manager and on the
    reference model.
    """

    def __init__(self, seed, policy, num_chunks=24):
        self.rng = random.Random(seed)
        self.is_lru = policy == "lru"
        options = HostTierOptions(cpu_bytes_to_use=1, eviction=policy)
        groups = {0: 16, 1: 32}
        self.manager = HostManager(num_chunks, options, groups, (0,), enable_events=True)
        self.plain = PlainTier(num_chunks)
        self.memory = {}  # chunk -> key whose bytes are stored in it
        self.live, self.stores, self.loads = [], [], []
        self.told = set()  # keys that are stored, according to the events
        self.counts = Counter()

    def run(self, num_steps):
        operations = [self.start, self.store, self.store, self.load, self.finish]
        for _ in range(num_steps):
            if self.rng.random() < 0.01:
                self.reset()
            if self.live or self.start():
                self.rng.choice(operations)()
            for jobs, end in (self.stores, self.end_store), (self.loads, self.end_load):
                if jobs and self.rng.random() < 0.4:
                    end(*jobs.pop(self.rng.randrange(len(jobs))))
            self.check()
        return self.counts

    def check(self):
        self.manager.check_invariants()
        for event in self.manager.take_events():
            assert self.told.isdisjoint(event.keys) or event.removed, "stored twice"
            (self.told.difference_update if event.removed else self.told.update)(event.keys)
        assert self.told == self.plain.loading | {*self.plain.idle}
        for context, keys in self.live:
            for key in keys:
                assert self.manager.lookup(key, context) is self.plain.state(key)

    def start(self):
        number, family, shared = (
            self.counts["requests"],
            self.rng.randrange(4),
            self.rng.randrange(8),
        )
        context, keys = ReqContext(f"r{number}"), []
        for group, size, most in (0, 16, 12), (1, 32, 6):
            for i in range(self.rng.randrange(1, most)):
                content = repr((family, i, None if i < shared else number))
                key = make_offload_key(content.encode().ljust(32, b"."), group)
                context.set_offload_key_position(key, (i + 1) * size)
                keys.append(key)
        self.manager.on_new_request(context)
        self.counts["requests"] += 1
        self.live.append((context, keys))
        return True

    def store(self):
        context, keys = self.rng.choice(self.live)
        keys = keys[: self.rng.randrange(1, len(keys) + 1)]
        before = {*self.plain.idle}
        found, expected = self.manager.prepare_store(keys, context), self.plain.prepare_store(keys)
        if found is None or expected is None:
            assert found is expected
            self.counts["refused"] += 1
            return
        new, evicted = expected
        assert found.keys_to_store == new and len(found.evicted_keys) == len(evicted)
        if not self.is_lru:  # other policies evict the same number of chunks, but different ones
            evicted = found.evicted_keys
            assert before.issuperset(evicted) and not set(keys) & set(evicted)
            self.plain.idle = [key for key in before if key not in evicted]
        assert set(found.evicted_keys) == set(evicted)
        chunks = found.store_spec.chunks.tolist()
        in_use = {chunk for *_, chunks in self.stores + self.loads for chunk in chunks}
        assert not in_use & {0, *chunks}, "a chunk in use is overwritten"
        self.memory.update(zip(chunks, new, strict=True))
        if new:
            self.stores.append((context, new, chunks))
        self.counts["evicted"] += len(evicted)

    def end_store(self, context, keys, _):
        is_well = self.rng.random() < 0.9
        self.manager.complete_store(set(keys), context, is_well)
        self.plain.storing.difference_update(keys)
        if is_well:
            self.plain.idle += last_first(context, keys)

    def load(self):
        context, keys = self.rng.choice(self.live)
        # vLLM does not load a chunk twice at the same time.
        hits = [k for k in keys if k in self.plain.idle]
        chunks = self.manager.prepare_load(hits, context).chunks.tolist()
        self.plain.idle = [key for key in self.plain.idle if key not in hits]
        self.plain.loading.update(hits)
        self.loads.append((context, hits, chunks))
        self.counts["hits"] += len(hits)

    def end_load(self, context, keys, chunks):
        assert [self.memory[chunk] for chunk in chunks] == keys, "bytes of other blocks are loaded"
        has_failed = self.rng.random() < 0.1
        if has_failed:
            self.manager.distrust(set(keys))
        self.manager.complete_load(set(keys), context)
        self.plain.loading.difference_update(keys)
        if not has_failed:
            self.plain.idle += last_first(context, keys)

    def finish(self):
        context, keys = self.rng.choice(self.live)
        if any(context is each for each, *_ in self.stores + self.loads):
            return
        self.live.remove((context, keys))
        self.manager.on_request_finished(context)
        for group in (0, 1):
            self.plain.release(
                last_first(context, [k for k in keys if k in self.noted(context, group)])
            )

    def reset(self):
        self.manager.reset_cache()
        self.plain = PlainTier(self.plain.num_chunks)
        self.stores, self.loads, self.told = [], [], set()

    def noted(self, context, group):
        """Return the keys that the request has offered or loaded since the last reset."""
        return [k for _, k in self.manager._state(context).by_group().get(group, ())]


def last_first(context, keys):
    return sorted(sorted(keys), key=context.get_offload_key_position, reverse=True)


@pytest.mark.parametrize("policy", host_eviction_names())
def test_manager_matches_the_plain_model(policy):
    seed = seed_of_test()
    print("seed", seed)
    counts = Workload(seed, policy).run(3_000)
    assert min(counts[name] for name in ("hits", "evicted", "refused", "requests")) > 0


def test_last_chunks_of_a_request_are_evicted_first():
    """This holds even if they were stored last, in a separate step."""
    tier = HostManager(4, HostTierOptions(1), {0: 16}, (0,))
    context = ReqContext("a")
    keys = [make_offload_key(bytes([i]) * 32, 0) for i in range(5)]
    for i, key in enumerate(keys):
        context.set_offload_key_position(key, 16 * (i + 1))
    for part in keys[:2], keys[2:4]:
        tier.prepare_store(part, context)
        tier.complete_store(set(part), context)
    tier.on_request_finished(context)
    other = ReqContext("b")
    other.set_offload_key_position(keys[4], 16)
    assert tier.prepare_store(keys[4:], other).evicted_keys == [keys[3]]


def test_blocks_used_by_only_one_request_are_not_stored_selectively():
    options = HostTierOptions(1, store="selective", num_requests_to_store=2)
    tier = HostManager(4, options, {0: 16})
    key = make_offload_key(bytes(32), 0)
    for number in range(3):
        context = ReqContext(str(number))
        context.set_offload_key_position(key, 16)
        for _ in range(2):  # the same request offers the key again
            stored = tier.prepare_store([key], context).keys_to_store
            assert stored == ([key] if number == 1 else [])
            tier.complete_store(set(stored), context)
            if stored:
                break
