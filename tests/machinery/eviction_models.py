# SPDX-License-Identifier: Apache-2.0
"""Plain models of the block pool and its eviction policies, written with lists and loops directly
from the definitions.
"""

from __future__ import annotations

import numpy as np

NEVER = float("inf")


def hash_of(number):
    """Return 32 pseudorandom bytes, different for each number."""
    return np.random.default_rng(number).bytes(32)


class Block:
    def __init__(self):
        self.refs = 0
        self.cached = None  # (hash number, group, parent's hash number or None)
        self.pins = 0
        self.released = 0  # logical time of the last release
        self.published = 0  # logical time of publication


class Pool:
    def __init__(self, num_blocks, policy):
        self.blocks = {i: Block() for i in range(1, num_blocks)}
        self.empty = list(self.blocks)  # free blocks without cached content, in allocation order
        self.policy = policy
        self.time = 0
        self.num_evicted = self.num_pins_broken = 0

    def tick(self):
        self.time += 1
        return self.time

    def cached(self):
        return [i for i, block in self.blocks.items() if block.cached]

    def free_cached(self):
        return [i for i in self.cached() if self.blocks[i].refs == 0]

    def num_free(self):
        return len(self.empty) + len(self.free_cached())

    def is_needed(self, i):
        """Whether this block is the only one cached under its hash and has cached children."""
        number, group, _ = self.blocks[i].cached
        twins = [j for j in self.cached() if self.blocks[j].cached[:2] == (number, group)]
        children = [j for j in self.cached() if self.blocks[j].cached[1:] == (group, number)]
        return len(twins) == 1 and len(children) > 0

    def lookup(self, number, group):
        found = [i for i in self.cached() if self.blocks[i].cached[:2] == (number, group)]
        return min(found, key=lambda i: self.blocks[i].published, default=-1)

    def candidates(self):
        free = [i for i in self.free_cached() if not self.blocks[i].pins]
        return [i for i in free if not self.policy.leaf_first or not self.is_needed(i)]

    def victim(self):
        prefers_least_recent = self.policy.prefers_least_recent()
        self.policy.before_victim()
        leaves = self.candidates()
        free = [i for i in self.free_cached() if not self.blocks[i].pins]
        if leaves and not prefers_least_recent:
            return self.policy.choose(leaves)
        free = leaves or free
        return min(free or self.free_cached(), key=lambda i: self.blocks[i].released)

    def allocate(self, n):
        if n > self.num_free():
            return None
        out = []
        for _ in range(n):
            if self.empty:
                i = self.empty.pop(0)
            else:
                i = self.victim()
                self.num_evicted += 1
                self.num_pins_broken += self.blocks[i].pins > 0
                self.forget(i, evicted=True)
            out.append(i)
        for i in out:
            self.blocks[i].refs = 1
            self.policy.on_allocate(i)
        return out

    def forget(self, i, evicted):
        number, group, _ = self.blocks[i].cached
        self.blocks[i].cached = None
        self.blocks[i].pins = 0
        self.policy.on_forget(i, (number, group), evicted)

    def retain(self, ids):
        for i in ids:
            self.blocks[i].refs += 1

    def release(self, ids):
        for i in ids:
            self.blocks[i].refs -= 1
            if self.blocks[i].refs:
                continue
            if self.blocks[i].cached:
                self.blocks[i].released = self.tick()
                self.policy.on_idle(i)
            else:
                self.empty.append(i)

    def publish(self, i, number, group, parent):
        self.blocks[i].cached = (number, group, parent)
        # A block without a parent stores "none", which is never a hash number, so it is no block's
        # child.
        if parent is None:
            self.blocks[i].cached = (number, group, "none")
        self.blocks[i].published = self.tick()
        self.policy.on_publish(i, (number, group), self.is_first(i))

    def is_first(self, i):
        """Return whether no other block is cached under the hash of this one."""
        return not any(
            block.cached and block.cached[:2] == self.blocks[i].cached[:2]
            for other, block in self.blocks.items()
            if other != i
        )

    def evict(self, i):
        if not self.blocks[i].cached:
            return
        self.forget(i, evicted=False)
        if self.blocks[i].refs == 0:
            self.empty.append(i)

    def reset(self):
        if any(block.refs for block in self.blocks.values()):
            return False
        self.empty += sorted(self.cached(), key=lambda i: self.blocks[i].released)
        for block in self.blocks.values():
            block.cached, block.pins = None, 0
        self.policy.clear()
        return True


class Policy:
    """The base policy. Ignores every notification."""

    leaf_first = True

    def prefers_least_recent(self):
        return False

    def on_allocate(self, i):
        self.forget_told(i)

    def on_forget(self, i, key, evicted):
        self.forget_told(i)

    def forget_told(self, i):
        pass

    def on_publish(self, i, key, is_first):
        pass

    def on_hit(self, i):
        pass

    def on_release(self, i, prefix, tokens_per_block, logical_time, retention):
        pass

    def on_idle(self, i):
        pass

    def on_access(self, i, now):
        pass

    def set_now(self, now):
        pass

    def before_victim(self):
        pass

    def clear(self):
        pass


def given_priority(prefix, tokens_per_block, retention, now):
    """Return the (priority, end of validity) that the retention ranges assign to a block, or None.

    `prefix` is the number of tokens up to the end of the block.
    """
    # Blocks start at multiples of tokens_per_block. The last token of this block is prefix - 1.
    first = (prefix - 1) // tokens_per_block * tokens_per_block
    wanted = [
        (priority, NEVER if ttl is None else now + ttl)
        for start, stop, priority, ttl in retention
        if max(start, first) < min(stop, prefix)
    ]
    return max(wanted, default=None)


class Lru(Policy):
    leaf_first = False

    def __init__(self, num_blocks):
        self.order = []

    def on_idle(self, i):
        if i in self.order:
            self.order.remove(i)
        self.order.append(i)

    def choose(self, ids):
        return min(ids, key=self.order.index)


class LastAccess(Policy):
    """Evicts the block that was accessed earliest. Ties are broken by longest prefix, then by
    release order.
    """

    def __init__(self, num_blocks):
        self.largest_now = 0
        self.any_access = False
        self.logical_time = 0
        self.order = []  # in release order
        self.clear()

    def clear(self):
        self.accessed = {}
        self.prefix = {}
        self.when_released = {}
        self.when_notified = {}

    def forget_told(self, i):
        for values in (self.accessed, self.prefix, self.when_released, self.when_notified):
            values.pop(i, None)

    def on_access(self, i, now):
        self.largest_now = max(self.largest_now, now) if self.any_access else now
        self.any_access = True
        self.accessed[i] = now

    def on_release(self, i, prefix, tokens_per_block, logical_time, retention):
        self.logical_time = logical_time
        self.prefix[i] = prefix
        self.when_notified[i] = (self.largest_now, logical_time)

    def on_idle(self, i):
        if i in self.order:
            self.order.remove(i)
        self.order.append(i)
        now = (self.largest_now, self.logical_time)
        self.when_released[i] = self.when_notified.pop(i, now)

    def choose(self, ids):
        def rank(i):
            if i in self.accessed:
                time, was_released, logical = self.accessed[i], False, 0
            else:
                (time, logical), was_released = self.when_released[i], True
            return time, was_released, logical, -self.prefix.get(i, 0), self.order.index(i)

        return min(ids, key=rank)


class Priority(Policy):
    """Evicts blocks by ascending priority, then by release order. Expired priorities are
    ignored.
    """

    def __init__(self, num_blocks, default_priority=35):
        self.default = default_priority
        self.now = 0
        self.order = []
        self.clear()

    def clear(self):
        self.given = {}

    def forget_told(self, i):
        self.given.pop(i, None)

    def set_now(self, now):
        self.now = max(self.now, now)

    def on_release(self, i, prefix, tokens_per_block, logical_time, retention):
        given = given_priority(prefix, tokens_per_block, retention, self.now)
        if given:
            self.given[i] = given

    def on_idle(self, i):
        if i in self.order:
            self.order.remove(i)
        self.order.append(i)

    def priority(self, i):
        priority, end = self.given.get(i, (self.default, NEVER))
        return priority if self.now < end else self.default

    def choose(self, ids):
        return min(ids, key=lambda i: (self.priority(i), self.order.index(i)))


MODELS = {"last_access": LastAccess, "lru": Lru, "priority": Priority}
