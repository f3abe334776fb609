"""The pool and its eviction policies, plain: lists, loops and no cleverness, from what they mean."""

from __future__ import annotations

NEVER = float("inf")


class Block:
    def __init__(self):
        self.refs = 0
        self.cached = None  # (hash number, group, number of the parent's hash or None)
        self.pins = 0
        self.released = 0  # when, among all blocks
        self.published = 0  # when, among all blocks


class Pool:
    def __init__(self, num_blocks, policy):
        self.blocks = {i: Block() for i in range(1, num_blocks)}
        self.empty = list(self.blocks)  # free and not cached, next one first
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
        """Whether a cached block is found through this one alone."""
        number, group, _ = self.blocks[i].cached
        twins = [j for j in self.cached() if self.blocks[j].cached[:2] == (number, group)]
        children = [j for j in self.cached() if self.blocks[j].cached[1:] == (group, number)]
        return len(twins) == 1 and len(children) > 0

    def lookup(self, number, group):
        found = [i for i in self.cached() if self.blocks[i].cached[:2] == (number, group)]
        return min(found, key=lambda i: self.blocks[i].published, default=-1)

    def victim(self):
        free = [i for i in self.free_cached() if not self.blocks[i].pins]
        leaves = [i for i in free if not self.policy.leaf_first or not self.is_needed(i)]
        if leaves:
            return self.policy.choose(leaves)
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
        if parent is None:  # not even behind the root of a chain
            self.blocks[i].cached = (number, group, "none")
        self.blocks[i].published = self.tick()
        self.policy.on_publish(i, (number, group))

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
    """Ignores every notification."""

    leaf_first = True

    def on_allocate(self, i):
        self.forget_told(i)

    def on_forget(self, i, key, evicted):
        self.forget_told(i)

    def forget_told(self, i):
        pass

    def on_publish(self, i, key):
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

    def clear(self):
        pass


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
    """By access time, then by longest prefix, then by release."""

    def __init__(self, num_blocks):
        self.largest_now = 0
        self.any_access = False
        self.logical_time = 0
        self.order = []  # by release
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


class SegmentedLru(Policy):
    """Protects blocks that were hit, up to a share of the pool; evicts the others first."""

    def __init__(self, num_blocks, protected_share=0.8):
        self.most_protected = int(protected_share * (num_blocks - 1))
        self.order = []  # all blocks, least recently hit, released or demoted first
        self.clear()

    def clear(self):
        self.protected = set()

    def on_forget(self, i, key, evicted):
        self.protected.discard(i)

    def touch(self, i):
        if i in self.order:
            self.order.remove(i)
        self.order.append(i)

    def on_idle(self, i):
        self.touch(i)

    def on_hit(self, i):
        self.touch(i)
        self.protected.add(i)

    def after_hits(self):
        while len(self.protected) > self.most_protected:
            least = min(self.protected, key=self.order.index)
            self.protected.remove(least)
            self.touch(least)

    def choose(self, ids):
        probation = [i for i in ids if i not in self.protected]
        return min(probation or ids, key=self.order.index)


class S3Fifo(Policy):
    """A small queue for what is new, a main one for what was hit or came back."""

    def __init__(self, num_blocks, small_share=0.1):
        self.small_size = int(small_share * (num_blocks - 1))
        self.most_ghosts = num_blocks
        self.clear()

    def clear(self):
        self.small, self.main, self.ghosts = [], [], []
        self.hits = {}

    def on_publish(self, i, key):
        self.hits[i] = 0
        if key in self.ghosts:
            self.ghosts.remove(key)
            self.main.append(i)
        else:
            self.small.append(i)

    def on_hit(self, i):
        self.hits[i] = min(3, self.hits[i] + 1)

    def on_forget(self, i, key, evicted):
        if i in self.main:
            self.main.remove(i)
            return
        self.small.remove(i)
        if evicted:
            if key in self.ghosts:
                self.ghosts.remove(key)
            self.ghosts.append(key)
            del self.ghosts[: -self.most_ghosts]

    def choose(self, ids):
        while True:
            small = [i for i in self.small if i in ids]
            main = [i for i in self.main if i in ids]
            if small and (len(self.small) >= self.small_size or not main):
                if self.hits[small[0]] < 2:
                    return small[0]
                self.small.remove(small[0])
                self.main.append(small[0])
                self.hits[small[0]] = 0
            else:
                if self.hits[main[0]] == 0:
                    return main[0]
                self.main.remove(main[0])
                self.main.append(main[0])
                self.hits[main[0]] -= 1


class Priority(Policy):
    """Lowest priority first, while it lasts; then by release."""

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
        # Blocks begin at multiples of tokens_per_block; this one ends with token prefix - 1.
        first = (prefix - 1) // tokens_per_block * tokens_per_block
        tokens = set(range(first, prefix))
        wanted = []
        for start, stop, priority, ttl in retention:
            if tokens & set(range(start, stop)):
                wanted.append((priority, NEVER if ttl is None else self.now + ttl))
        if wanted:
            self.given[i] = max(wanted)

    def on_idle(self, i):
        if i in self.order:
            self.order.remove(i)
        self.order.append(i)

    def priority(self, i):
        priority, end = self.given.get(i, (self.default, NEVER))
        return priority if self.now < end else self.default

    def choose(self, ids):
        return min(ids, key=lambda i: (self.priority(i), self.order.index(i)))


MODELS = {
    "last_access": LastAccess,
    "lru": Lru,
    "priority": Priority,
    "s3_fifo": S3Fifo,
    "segmented_lru": SegmentedLru,
}
