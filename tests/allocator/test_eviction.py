# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: every victim matches the reference model's (`eviction_models.py`)."""

import hashlib
import random

import numpy as np
import pytest

from kvcache import BlockPool
from kvcache.native.load import core
from tests.machinery.eviction_models import MODELS, Pool
from tests.machinery.eviction_models import hash_of as hash_of_number
from tests.machinery.shared import sampled

NUM_NODES = 20  # number of prefixes in a tree; the parent of node k is node (k - 1) // 2
OPTIONS = {"priority": [{}, {"default_priority": 0}, {"default_priority": 60}]}
CASES = [
    (name, options, seed)
    for repeat in range(4)
    for name in MODELS
    for seed, options in enumerate(OPTIONS.get(name, [{}]), 10 * repeat)
]
POLICIES = [*(name for name in MODELS if name != "lru"), "learned"]


def parent_of(node):
    return "root" if node == 0 else (node - 1) // 2


def path_to(node):
    """Return the nodes from the root to this node."""
    return [node] if node == 0 else [*path_to((node - 1) // 2), node]


def hashes(nodes):
    return np.array([list(hash_of_number(node)) for node in nodes], np.uint8).reshape(-1, 32)


def hash_of(node):
    return None if node == "root" else hashes([node]).tobytes()


class Driver:
    """Applies the same operations to a pool and to its model, and compares the observable state."""

    def __init__(self, name, options, seed):
        self.random = random.Random(f"{name} {options} {seed}")
        num_blocks = self.random.randint(6, 24)
        self.pool = BlockPool(num_blocks, name, options)
        self.model = Pool(num_blocks, MODELS[name](num_blocks, **options))
        self.now = self.logical_time = 0
        self.sizes = [1, 4, 16]
        self.requests = []  # [group, nodes, ids, number of published blocks]

    def some(self, ids, most=4):
        return [self.random.choice(ids) for _ in range(self.random.randint(1, most))] if ids else []

    def allocate(self, n):
        out = self.pool.allocate(n)
        expected = self.model.allocate(n)
        assert (None if out is None else out.tolist()) == expected
        return expected

    def publish(self, group, nodes, ids):
        is_chain = group != 1
        first = parent_of(nodes[0]) if nodes else "root"
        self.pool.publish(ids, hashes(nodes), group, hash_of(first), is_chain)
        for i, node in zip(ids, nodes, strict=True):
            self.model.publish(i, node, group, parent_of(node) if is_chain else None)

    def hit(self, ids):
        self.pool.hit(ids)
        for i in ids:
            self.model.policy.on_hit(i)

    def start(self):
        """Start a request: retain its hits and allocate its new blocks.

        Some of the new blocks are published immediately.
        """
        group = self.random.choice([0, 0, 0, 1, 2])
        nodes = path_to(self.random.randrange(NUM_NODES))
        hits = []
        if self.random.random() < 0.8:  # otherwise, ignore the cache and create duplicates
            for node in nodes:
                found = self.model.lookup(node, group)
                if found < 0:
                    break
                hits.append(found)
        self.pool.retain(hits)
        self.model.retain(hits)
        new = self.allocate(len(nodes) - len(hits))
        if new is None:
            self.pool.release(hits[::-1])
            self.model.release(hits[::-1])
            return
        if self.random.random() < 0.9:
            self.hit(hits)
        request = [group, nodes, hits + new, len(hits)]
        self.requests.append(request)
        self.extend(request)

    def extend(self, request):
        group, nodes, ids, done = request
        stop = self.random.choice([self.random.randint(done, len(nodes)), len(nodes)])
        self.publish(group, nodes[done:stop], ids[done:stop])
        request[3] = stop

    def publish_more(self):
        for request in self.requests:
            if request[3] < len(request[1]) and self.random.random() < 0.5:
                # A held block that was withdrawn from the cache is not published again.
                self.extend(request)

    def finish(self):
        if not self.requests:
            return
        ids = self.requests.pop(self.random.randrange(len(self.requests)))[2]
        size = self.random.choice(self.sizes)
        prefixes = [size * (k + 1) for k in range(len(ids))]
        prefixes[-1] -= self.random.randrange(size)  # the last block may be partial
        order = list(range(len(ids)))[::-1]
        if self.random.random() < 0.2:
            self.random.shuffle(order)
        ids, prefixes = [ids[k] for k in order], [prefixes[k] for k in order]
        if self.random.random() < 0.8:
            self.notify_release(ids, prefixes, size)
        self.pool.release(ids)
        self.model.release(ids)

    def notify_release(self, ids, prefixes, size):
        self.logical_time += self.random.randint(0, 2)
        retention = []
        for _ in range(self.random.choice([0, 0, 1, 1, 2, 3])):
            first = self.random.randrange(5 * size)
            stop = first + self.random.randrange(3 * size)
            ttl = self.random.choice([None, 0, 1, 2, 5, 20])
            retention.append((first, stop, self.random.choice([0, 20, 35, 36, 60, 100]), ttl))
        num_prefix_tokens = self.random.choice(
            [0, max(prefixes), self.random.randint(0, max(prefixes))]
        )
        num_output_tokens = self.random.choice([0, 99, 100, 300, 1000])
        self.pool.notify_release(
            ids,
            prefixes,
            tokens_per_block=size,
            logical_time=self.logical_time,
            num_prefix_tokens=num_prefix_tokens,
            num_new_blocks=2,
            num_output_tokens=num_output_tokens,
            wall_ms=0,
            retention=retention,
        )
        for i, prefix in zip(ids, prefixes, strict=True):
            self.model.policy.on_release(i, prefix, size, self.logical_time, retention)
        if hasattr(self.model.policy, "on_release_all"):
            self.model.policy.on_release_all(
                ids, prefixes, size, num_prefix_tokens, num_output_tokens
            )

    def access(self):
        self.now += self.random.choice([0, 0, 1])
        now = self.now - self.random.choice([0, 0, 0, 0, 0, 2])
        held = [i for request in self.requests for i in request[2]]
        if self.random.random() < 0.5 and self.requests:
            ids = self.random.choice(self.requests)[2]
        else:
            ids = self.some(held + self.model.cached())
        if not ids:
            return
        self.pool.access(ids, now)
        for i in ids:
            self.model.policy.on_access(i, now)

    def pin(self):
        ids = self.some(self.model.cached(), most=3)
        if not ids or self.random.random() < 0.3:
            ids = [*ids, self.random.randrange(1, self.pool.num_blocks)]
        if not all(self.model.blocks[i].cached for i in ids):
            with pytest.raises(ValueError, match="which is not cached"):
                self.pool.pin(ids)
            return
        self.pool.pin(ids)
        for i in ids:
            self.model.blocks[i].pins += 1

    def unpin(self):
        pinned = [i for i, block in self.model.blocks.items() for _ in range(block.pins)]
        ids = self.random.sample(pinned, self.random.randint(0, len(pinned)))
        if self.random.random() < 0.2:
            extra = self.random.randrange(1, self.pool.num_blocks)
            ids.append(extra)
            if ids.count(extra) > self.model.blocks[extra].pins:
                with pytest.raises(ValueError, match="which is pinned fewer times"):
                    self.pool.unpin(ids)
                return
        self.pool.unpin(ids)
        for i in ids:
            self.model.blocks[i].pins -= 1

    def evict(self):
        for i in self.some(list(self.model.blocks), most=2):
            self.pool.evict([i])
            self.model.evict(i)
        # Stop publishing a request's blocks once one of them was evicted.
        for request in self.requests:
            if not all(self.model.blocks[i].cached for i in request[2][: request[3]]):
                request[3] = len(request[1])

    def take_many(self):
        """Evict some or all candidates, and return their blocks to the free list."""
        most = self.model.num_free()
        ids = self.allocate(self.random.choice([most, most + 1, self.random.randint(0, most)]))
        if ids:
            self.pool.release(ids)
            self.model.release(ids)

    def pass_time(self):
        self.now += self.random.choice([1, 1, 5])
        now = self.now - self.random.choice([0, 0, 0, 8])  # a clock that runs backwards is ignored
        self.pool.set_now(now)
        self.model.policy.set_now(now)

    def hit_some(self):
        ids = self.some(self.model.cached())
        if ids:
            self.hit(ids)

    def reset(self):
        if self.random.random() < 0.05:
            while self.requests:
                self.finish()
        assert self.pool.reset() == self.model.reset()

    def fail_to_release(self):
        held = [i for request in self.requests for i in request[2]]
        self.random.shuffle(held)
        with pytest.raises(ValueError, match="more often than it is held"):
            self.pool.release([*held, held[0] if held else 1])

    def step(self):
        operations = {
            self.start: 30,
            self.finish: 26,
            self.publish_more: 4,
            self.access: 6,
            self.pin: 3,
            self.unpin: 3,
            self.evict: 2,
            self.take_many: 2,
            self.pass_time: 5,
            self.hit_some: 3,
            self.reset: 2,
            self.fail_to_release: 1,
        }
        self.random.choices(list(operations), operations.values())[0]()
        self.compare()

    def compare(self):
        pool, model = self.pool, self.model
        pool.check_invariants()
        assert pool.num_free == model.num_free()
        assert pool.num_cached == len(model.cached())
        assert pool.num_evicted == model.num_evicted
        assert pool.num_pinned == sum(block.pins > 0 for block in model.blocks.values())
        assert pool.num_pins_broken == model.num_pins_broken
        if self.random.random() < 0.7:
            return
        ids = list(model.blocks)
        assert pool.ref_counts(ids).tolist() == [model.blocks[i].refs for i in ids]
        for group in (0, 1, 2):
            found = pool.lookup(hashes(range(NUM_NODES)), group, prefix=False).tolist()
            assert found == [model.lookup(node, group) for node in range(NUM_NODES)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "seed"), sampled(CASES, len(CASES) // 4))
def test_every_victim_matches_the_model(name, options, seed):
    """Each policy runs 8,000 operations, divided among its cases."""
    num_cases = sum(case[0] == name for case in CASES)
    driver = Driver(name, options, seed)
    for _ in range(8_000 // num_cases + 1):
        driver.step()
    assert driver.model.num_evicted > 100


def test_policy_does_not_learn_from_releases_of_unheld_blocks():
    pool = BlockPool(20, "learned")
    ids = pool.allocate(4)
    pool.publish(ids, hashes(range(4)))
    pool.notify_release(ids[::-1], [4, 3, 2, 1])
    pool.release(ids[::-1])
    for _ in range(3):  # the blocks or their children are already eviction candidates
        pool.notify_release(ids[::-1], [4, 3, 2, 1])
        pool.notify_release([ids[3]] * 2, [4, 4])
    pool.check_invariants()
    assert pool.allocate(19).tolist()[-4:] == ids[::-1].tolist()
    pool.check_invariants()


def test_continued_conversations_outlive_abandoned_ones():
    """Two-turn conversations compete with one-off prompts. LRU does not distinguish the two."""
    hits = {}
    for name in ("lru", "learned"):
        pool, hits[name] = BlockPool(401, name), 0
        for number in range(600):
            # In each round, one conversation begins, and an earlier one continues with its next
            # turn.
            chats = [[5, 1000 + number, 0], [5, 1000 + number - 30, 0, 1]]
            scans = [[9, 10_000 * k + number, *range(8)] for k in (1, 2)]
            for request in (*chats, *scans):
                hits[name] += serve(pool, [tuple(request[: k + 1]) for k in range(1, len(request))])
    assert hits["lru"] == 0
    assert hits["learned"] > 1000


def serve(pool, prefixes):
    """Serve a request whose blocks have these contents. Return the number of hit blocks."""
    keys = np.array([list(hashlib.sha256(repr(each).encode()).digest()) for each in prefixes])
    keys = keys.astype(np.uint8)
    found = pool.lookup(keys)
    held = found[: next((i for i, each in enumerate(found) if each < 0), len(found))]
    pool.retain(held)
    pool.hit(held)
    new = pool.allocate(len(keys) - len(held))
    pool.publish(new, keys[len(held) :], 0, keys[len(held) - 1].tobytes() if len(held) else None)
    ids = [*held.tolist(), *new.tolist()][::-1]
    ends = 512 * np.arange(len(ids), 0, -1)
    pool.notify_release(ids, ends, tokens_per_block=512, num_prefix_tokens=512 * len(held))
    pool.release(ids)
    return len(held)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_victims_are_leaves_while_there_is_a_leaf(name):
    rng = random.Random(name)
    num_blocks = 32
    pool = BlockPool(num_blocks, name)
    held, content = [], {}  # blocks with references, and block -> (node, parent)

    def leaves():
        parents = {parent for _, parent in content.values()}
        nodes = [node for node, _ in content.values()]
        free = [i for i in content if pool.ref_counts([i])[0] == 0]
        return {i for i in free if content[i][0] not in parents or nodes.count(content[i][0]) > 1}

    num_checked = 0
    for _ in range(1500):
        node = rng.randrange(NUM_NODES)
        candidates = leaves()
        fresh = any(i not in content and i not in held for i in range(1, num_blocks))
        taken = pool.allocate(1)
        if taken is not None and not fresh:
            assert not candidates or taken[0] in candidates
            num_checked += bool(candidates)
        if taken is not None:
            content.pop(int(taken[0]), None)
            pool.publish(taken, hashes([node]), 0, hash_of(parent_of(node)))
            content[int(taken[0])] = (node, parent_of(node))
            held.append(int(taken[0]))
        if content and rng.random() < 0.4:
            hit = rng.choice(list(content))
            pool.retain([hit])
            pool.hit([hit])
            held.append(hit)
        while held and (len(held) > 12 or rng.random() < 0.4):
            pool.release([held.pop(rng.randrange(len(held)))])
    assert num_checked > 500
    pool.check_invariants()


def chain(pool, nodes, group=0):
    """Allocate and publish a chain of blocks for these nodes, and hold them."""
    ids = pool.allocate(len(nodes))
    pool.publish(ids, hashes(nodes), group)
    return ids


@pytest.mark.parametrize("name", POLICIES)
def test_window_blocks_have_no_parents(name):
    pool = BlockPool(4, name)
    ids = pool.allocate(3)
    pool.publish(ids, hashes([0, 1, 3]), is_chain=False)
    pool.release(ids)
    assert pool.allocate(3).tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", [*MODELS, "learned"])
def test_pinned_blocks_are_evicted_last_in_order_of_release(name):
    pool = BlockPool(7, name)
    pinned, other = chain(pool, [0, 1, 3]), chain(pool, [2, 5, 11])
    pool.pin(pinned)  # released heads first
    pool.release(pinned[::-1])
    pool.release(other[::-1])
    assert pool.allocate(4).tolist() == [6, 5, 4, 3]
    assert (pool.num_pinned, pool.num_pins_broken) == (2, 1)
    pool.unpin([1])
    pool.check_invariants()
    assert pool.allocate(2).tolist() == [1, 2]
    assert (pool.num_pinned, pool.num_pins_broken) == (0, 2)


@pytest.mark.parametrize("name", [*MODELS, "learned"])
def test_unpinned_block_returns_to_its_place_in_the_eviction_order(name):
    pool = BlockPool(5, name)
    ids = pool.allocate(4)
    pool.publish(ids, hashes([0, 1, 2, 3]), is_chain=False)
    pool.release(ids)
    pool.pin([1, 2, 1])
    assert pool.allocate(1).tolist() == [3]
    pool.unpin([2, 1])
    assert pool.is_pinned(1) and not pool.is_pinned(2)
    pool.unpin([1])
    # `learned` orders the blocks of one release by when they became candidates.
    assert pool.allocate(3).tolist() == ([4, 2, 1] if name == "learned" else [1, 2, 4])
    assert pool.num_pins_broken == 0


def test_default_policy_is_lru_and_gets_no_notifications():
    assert core.eviction_names() == sorted([*MODELS, "learned"])
    pool = BlockPool(5)
    assert not pool.has_policy and BlockPool(5, "priority").has_policy
    ids = chain(pool, [0, 1])
    pool.hit(ids)
    pool.access(ids, 3.5)
    pool.set_now(9)
    pool.notify_release(ids, [16, 32], retention=[(0, 99, 100, None)])
    pool.release(ids)
    assert pool.allocate(4).tolist() == [3, 4, 1, 2]


@pytest.mark.parametrize(("name", "options", "message"), [
    ("fifo", {}, "eviction is 'fifo': expected one of last_access, learned, lru, priority"),
    ("lru", {"x": 1}, "eviction 'lru': option 'x' is 1: expected no options"),
    ("learned", {"x": 1}, "eviction 'learned': option 'x' is 1: expected no options"),
    ("priority", {"x": 0.5}, "is 0.5: expected one of the options 'default_priority'"),
    ("priority", {"default_priority": float("nan")}, "is nan: expected an integer from 0 to 100"),
    ("priority", {"default_priority": 35.5}, "is 35.5: expected an integer from 0 to 100"),
])  # fmt: skip
def test_unknown_policies_and_options_are_reported(name, options, message):
    with pytest.raises(ValueError, match=message):
        BlockPool(8, name, options)


def released(**options):
    return lambda p: p.notify_release([1], [1], **options)


@pytest.mark.parametrize(("call", "message"), [
    (lambda p: p.hit([1, 3]), "ids holds block 3, which is not cached"),
    (lambda p: p.hit([9]), "ids holds block 9: expected 1 to 5"),
    (lambda p: p.access([0], 1), "ids holds block 0: expected 1 to 5"),
    (lambda p: p.access([1], float("inf")), "now is inf: expected a finite number"),
    (lambda p: p.set_now(float("nan")), "seconds is nan: expected a finite number"),
    (lambda p: p.notify_release([6], [1]), "ids holds block 6: expected 1 to 5"),
    (lambda p: p.notify_release([1], [1, 2]), "ids has 1 entries, but prefix_tokens has 2"),
    (lambda p: p.notify_release([1], [0]), r"prefix_tokens\[0\] is 0: expected 1 or more"),
    (released(tokens_per_block=0), "tokens_per_block is 0: expected 1 or more"),
    (released(retention=[(0, 1, 5, None), (3, 2, 5, None)]), r"retention\[1\] covers tokens 3 to"),
    (released(retention=[(0, 1, 101, None)]), r"retention\[0\] has priority 101: expected 0 to"),
    (released(retention=[(0, 1, 1, -2)]), r"retention\[0\] has ttl_s -2: expected 0 or more, or"),
    (lambda p: p.pin([1, 3]), "ids holds block 3, which is not cached: expected a cached"),
    (lambda p: p.pin([1, -1]), "ids holds block -1: expected 1 to 5"),
    (lambda p: p.unpin([2, 2]), "ids holds block 2, which is pinned fewer times"),
    (lambda p: p.unpin([2, 7]), "ids holds block 7: expected 1 to 5"),
    (lambda p: p.publish([3], hashes([4]), 0, b"short"), "parent has 5 bytes: expected 32"),
])  # fmt: skip
@pytest.mark.parametrize("name", POLICIES)
def test_invalid_call_is_reported_and_changes_nothing(name, call, message):
    pool = BlockPool(6, name)
    ids = chain(pool, [0, 1])
    pool.pin([2])
    held = pool.allocate(1)
    pool.release(ids[::-1])
    with pytest.raises(ValueError, match=message):
        call(pool)
    pool.check_invariants()
    assert (pool.num_cached, pool.num_free, pool.num_pinned) == (2, 4, 1)
    assert pool.ref_counts(held).tolist() == [1]
    assert pool.allocate(4).tolist() == [4, 5, 1, 2]
    assert pool.num_pins_broken == 1


@pytest.mark.parametrize("name", POLICIES)
def test_parent_of_a_held_block_is_evicted_if_no_other_block_is_free(name):
    pool = BlockPool(4, name)
    ids = chain(pool, [0, 1, 3])
    pool.release(ids[:2])
    assert pool.allocate(1).tolist() == [1]
    pool.check_invariants()
    assert pool.lookup(hashes([0, 1, 3]), prefix=False).tolist() == [-1, 2, 3]
