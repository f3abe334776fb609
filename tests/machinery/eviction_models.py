# SPDX-License-Identifier: Apache-2.0
"""Plain models of the block pool and its eviction policies, written with lists and loops directly
from the definitions.
"""

from __future__ import annotations

import itertools
import math

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


class Segment:
    """Blocks that were released together."""

    def __init__(self, number, time, reuse_class, num_forks=0, cost=1.0):
        self.number = number
        self.time = time  # clock at the release, in ms
        self.reuse_class = reuse_class
        self.num_forks = num_forks
        self.cost = cost


class Ghost:
    """The record of a released block."""

    def __init__(self, key, time, reuse_class, turn, is_sample, is_end):
        self.key = key
        self.time = time
        self.reuse_class = reuse_class
        self.turn = turn
        self.is_sample = is_sample
        self.is_end = is_end  # last block of a request
        self.is_used = False
        self.bucket = 0


class ByWorth(Policy):
    """Evicts the segment with the lowest worth, estimated from what `source` has learned."""

    NUM_OWN, NUM_SHARED, NUM_BUCKETS, NUM_GHOSTS = 72, 4, 26, 32_768
    LEFT = NUM_OWN + NUM_SHARED
    LOOSE, LOADED = LEFT + 1, LEFT + 2
    FIRST_BUCKET = 2_000  # ms
    may_follow_lru = True
    # For each class of a request's own blocks, the levels of the time since the previous turn, of
    # the number of added tokens, and of the answer length.
    LEVELS = tuple((own // 12, own // 4 % 3, own % 4) for own in range(NUM_OWN))

    def open(self, *facts):
        self.num_opened += 1
        return Segment(self.num_opened, *facts)

    def assign(self, i, segment):
        self.num_assigned += 1
        self.segment_of[i], self.order[i] = segment, self.num_assigned

    def follow(self, i, segment, level=0):
        """Add a block from `segment` that was copied or whose priority has expired.

        The block joins the segment opened last if that one was also opened for blocks from
        `segment`.
        """
        followed, following = self.following.get(level, (None, None))
        if followed is not segment or following not in self.segment_of.values():
            following = self.open(
                segment.time, segment.reuse_class, segment.num_forks, segment.cost
            )
            self.following[level] = segment, following
        self.assign(i, following)

    def joined(self, segment, reuse_class):
        """Return the segment for a block that no release has assigned to a segment: `segment`, or a
        new one if `segment` is full or old.
        """
        clock = self.source.clock
        num_there = list(self.segment_of.values()).count(segment)
        if 0 < num_there < 64 and clock - segment.time < self.FIRST_BUCKET:
            return segment
        return self.open(clock, reuse_class)

    def worth(self, segment):
        if segment.reuse_class == self.LOADED:
            return 0.0
        index, age = self.source.index[segment.reuse_class], self.source.clock - segment.time
        b = self.source.bucket_of(age)
        if b + 1 == self.NUM_BUCKETS:
            return index[b] * segment.cost
        share = (age - self.source.begin[b]) / (self.source.begin[b + 1] - self.source.begin[b])
        return (index[b] + share * (index[b + 1] - index[b])) * segment.cost

    def level(self, i):
        """Return (priority, tenant) of a block."""
        return 0, 0

    def choose(self, ids):
        """Choose a block among those with the lowest priority. Prefer the tenant that exceeds its
        share by the most blocks, and then the segment with the least worth.
        """
        levels = sorted(set(map(self.level, ids)))
        victims = [
            self.choose_of(level, [i for i in ids if self.level(i) == level])
            for level in levels
            if level[0] == levels[0][0]
        ]
        return min(victims, key=lambda i: (-self.over(i), self.worth(self.segment_of[i])))

    def over(self, i):
        return 0

    def choose_of(self, level, ids):
        chosen = self.chosen.get(level)
        if all(self.segment_of[i] is not chosen for i in ids):
            chosen = self.chosen[level] = self.choose_segment({self.segment_of[i] for i in ids})
        return min((i for i in ids if self.segment_of[i] is chosen), key=self.order.get)

    def choose_segment(self, segments):
        """Prefer segments whose blocks were loaded into the other tier.

        Otherwise compare the oldest and youngest segment of each class.
        """
        loaded = [s for s in segments if s.reuse_class == self.LOADED]
        if loaded:
            return min(loaded, key=lambda segment: segment.number)
        ends, firsts = [], []
        for c in range(self.LOOSE + 1):
            of_class = [s for s in segments if s.reuse_class == c]
            of_class.sort(key=lambda segment: segment.number)
            ends += [of_class[0], of_class[-1]] if of_class else []
            firsts += of_class[:1]
        oldest = min(firsts, key=lambda segment: (segment.time, segment.number))
        is_full = len(self.source.ghosts) == self.NUM_GHOSTS
        if self.may_follow_lru and self.source.guard.follows_lru:
            return oldest
        if is_full and self.source.clock - self.source.ghosts[0].time < 2 * (
            self.source.clock - oldest.time
        ):
            return oldest
        return min(ends, key=lambda each: (self.worth(each), each.time, each.number))


class ShadowWorth(ByWorth):
    """Simulates a pool, whose blocks are identified by their keys, that evicts by worth."""

    may_follow_lru = False

    def __init__(self, capacity, source):
        self.capacity, self.source = capacity, source
        self.num_assigned = self.num_opened = 0
        self.clear()

    def clear(self):
        self.present, self.idle, self.segment_of, self.order = set(), set(), {}, {}
        self.chosen, self.loose, self.segment = {}, None, None

    def hold(self, key):
        is_hit = key in self.present
        self.idle.discard(key)
        if not is_hit:
            self.add(key)
        return is_hit

    def add(self, key):
        if key not in self.present and len(self.present) + 2 < 2 * self.capacity + 64:
            self.present.add(key)
            self.shrink()
        return key in self.present

    def begin(self, *facts):
        self.facts, self.segment = facts, None

    def release(self, key):
        if self.add(key):
            if self.segment not in self.segment_of.values():
                self.segment = self.open(*self.facts)
            self.assign(key, self.segment)

    def assign_loose(self, key):
        if self.add(key):
            self.loose = self.joined(self.loose, self.LOOSE)
            self.assign(key, self.loose)

    def make_idle(self, key):
        if self.add(key) and key not in self.idle:
            if key not in self.segment_of:
                self.assign_loose(key)
            self.idle.add(key)
            self.shrink()

    def remove(self, key):
        self.present.discard(key)
        self.idle.discard(key)
        self.segment_of.pop(key, None)

    def shrink(self):
        while len(self.present) > self.capacity and self.idle:
            self.remove(self.choose_of(0, list(self.idle)))


class LruGuard:
    """Compares a policy's hits with those of LRU. The policy follows LRU if it loses many hits,
    until a simulated pool that evicts by worth gains hits.
    """

    def __init__(self, num_blocks, source):
        self.one_of = max((num_blocks - 1) // 4_096, 1)
        self.capacity = max((num_blocks - 1) // self.one_of, 1)
        self.source = source
        self.shadow, self.held = {}, set()  # released keys, oldest first; held keys
        self.by_worth = None
        self.lead = self.lead_at_failure = self.gain = self.deficit = 0
        self.evidence = self.num_left = self.level = 0

    @property
    def follows_lru(self):
        return self.by_worth is not None

    def samples(self, key):
        return key <= (2**32 - 1) // self.one_of

    def clear(self):
        self.shadow, self.held = {}, set()
        if self.by_worth:
            self.by_worth.clear()

    def note_use(self, key, is_hit):
        if not self.samples(key):
            return
        is_hit_of_lru = key in self.shadow or key in self.held
        self.shadow.pop(key, None)
        self.held.add(key)
        self.shrink()
        gain = is_hit - is_hit_of_lru
        if self.by_worth:
            most = self.lead_at_failure
            self.lead = min(max(self.lead + gain, most - self.capacity), most)
            gain_by_worth = self.by_worth.hold(key) - is_hit_of_lru
            self.evidence = max(self.evidence + gain_by_worth, 0)
            self.num_left = max(self.num_left - 1, 0)
            wanted = max(self.capacity // (16 if self.level == 1 else 4), 1)
            if not self.num_left and self.evidence >= wanted:
                self.by_worth = None
                self.deficit = self.gain = 0
            return
        self.lead += gain
        self.gain += gain
        self.deficit = max(self.deficit - gain, 0)
        least = max(self.capacity // (4 if self.level else 128), 1)
        if self.deficit >= min(max(least + self.lead + self.deficit, least), self.capacity):
            self.num_left = 2 * self.capacity << self.level
            self.level = min(self.level + 1, 30)
            self.evidence, self.lead_at_failure = 0, self.lead
            self.by_worth = ShadowWorth(self.capacity, self.source)
        elif self.gain >= 2 * self.capacity:
            self.level, self.gain = max(self.level - 1, 0), 0

    def begin_segment(self, *facts):
        if self.by_worth:
            self.by_worth.begin(*facts)

    def note_release(self, key):
        if self.by_worth and self.samples(key):
            self.by_worth.release(key)

    def note_loose(self, key):
        if self.by_worth and self.samples(key):
            self.by_worth.assign_loose(key)

    def note_idle(self, key):
        if self.samples(key):
            self.shadow.pop(key, None)
            self.held.discard(key)
            self.shadow[key] = None
            self.shrink()
            if self.by_worth:
                self.by_worth.make_idle(key)

    def shrink(self):
        while self.shadow and len(self.shadow) + len(self.held) > self.capacity:
            del self.shadow[next(iter(self.shadow))]

    def forget(self, key):
        self.shadow.pop(key, None)
        self.held.discard(key)
        if self.by_worth:
            self.by_worth.remove(key)


class Learned(ByWorth):
    """Learns from a sample of blocks when each class is reused, and evicts the segment with the
    lowest worth.
    """

    def __init__(self, num_blocks, double_cost_tokens=0, tenant_share=1):
        self.source = self
        self.has_shares, self.most = tenant_share < 1, int(tenant_share * (num_blocks - 1))
        self.double_cost = double_cost_tokens
        self.num_blocks = self.now = 0
        self.sample(num_blocks)
        self.begin, width = [0.0], float(self.FIRST_BUCKET)
        for _ in range(self.NUM_BUCKETS):
            self.begin.append(self.begin[-1] + width)
            width *= math.sqrt(2.0)
        counts = [[0.0] * self.NUM_BUCKETS for _ in range(2 * (self.LOOSE + 1))]
        self.reached, self.used = counts[: self.LOOSE + 1], counts[self.LOOSE + 1 :]
        self.guard = LruGuard(num_blocks, self)
        self.ghosts, self.youngest, self.num_ghosts = [], {}, 0
        self.clock = self.num_releases = self.num_assigned = self.num_opened = 0
        self.factors = [[[1.0] * 7 for _ in range(6)] for _ in range(3)]
        self.solve()
        self.clear()

    def sample(self, num_blocks):
        """Adjust the sampling rate for `num_blocks` additional cached blocks."""
        self.num_blocks += num_blocks
        self.one_of = max(self.num_blocks // 3000, 1)
        self.last_sampled = (2**32 - 1) // self.one_of

    def clear(self):
        self.keys, self.segment_of, self.order, self.told = {}, {}, {}, set()
        self.given, self.wanted = {}, {}  # block -> (priority, end)
        self.tenants = {}  # block -> tenant
        self.guard.clear()
        self.chosen, self.loose = {}, {}  # keyed by level
        self.following = {}

    def bucket_of(self, age):
        return sum(begin <= age for begin in self.begin[1 : self.NUM_BUCKETS])

    def ghost_of(self, key):
        """Return the youngest record of the key if it is still in the ring, else None."""
        ghost = self.youngest.get(key)
        return ghost if ghost and ghost.number > self.num_ghosts - self.NUM_GHOSTS else None

    def key_of(self, key):
        number, group = key
        word = int.from_bytes(hash_of(number)[:8], "little")
        return max((((word + group) * 0x9E3779B97F4A7C15) % 2**64 >> 32) & ~1, 2)

    def on_publish(self, i, key, is_first):
        self.keys[i] = self.key_of(key)
        if is_first:
            self.guard.note_use(self.keys[i], False)
        self.note_use(self.keys[i])

    def on_hit(self, i):
        self.guard.note_use(self.keys[i], True)
        self.note_use(self.keys[i])

    def note_use(self, key):
        ghost = self.ghost_of(key) if key <= self.last_sampled else None
        if ghost is None or not ghost.is_sample or ghost.is_used:
            return
        ghost.is_used = True
        bucket = self.bucket_of(self.clock - ghost.time)
        for b in range(ghost.bucket + 1, bucket + 1):
            self.reached[ghost.reuse_class][b] += 1
        ghost.bucket = max(ghost.bucket, bucket)
        self.used[ghost.reuse_class][bucket] += 1

    def set_now(self, now):
        self.now = max(self.now, now)
        self.clock = max(self.clock, round(1000 * now))

    def on_release(self, i, prefix, tokens_per_block, logical_time, retention):
        given = given_priority(prefix, tokens_per_block, retention, self.now)
        if given:
            self.wanted[i] = given

    def give(self, i):
        """Set the block's priority to the one given at this release, or else to an earlier one that
        has not expired.
        """
        self.tenants[i] = self.tenant
        priority, end = self.wanted.get(i) or self.given.get(i, (35, NEVER))
        self.given.pop(i, None)
        if priority != 35 and end > self.now:
            self.given[i] = priority, end

    def level(self, i):
        return self.given.get(i, (35, NEVER))[0], self.tenants.get(i, 0)

    def prefers_least_recent(self):
        is_single = all(self.level(i) == (35, 0) for i in [*self.given, *self.tenants])
        return self.guard.follows_lru and is_single

    def over(self, i):
        """Return the number of blocks by which the block's tenant exceeds its share."""
        tenant = self.tenants.get(i, 0)
        num = list(self.tenants.values()).count(tenant)
        return max(num - self.most, 0) if tenant else 0

    def before_victim(self):
        over = sorted((end, i) for i, (_, end) in self.given.items() if end <= self.now)
        for _, i in over:
            del self.given[i]
            if i in self.segment_of:
                self.follow(i, self.segment_of[i], self.level(i))

    def on_release_all(
        self,
        ids,
        prefixes,
        size,
        num_prefix_tokens,
        num_output_tokens,
        tenant=0,
    ):
        chain = sorted((prefix, i) for i, prefix in zip(ids, prefixes) if i in self.keys)
        self.tenant = 1 + tenant % 63 if self.has_shares and tenant else 0
        self.release(chain, size, num_prefix_tokens, num_output_tokens)
        self.wanted = {}

    def release(self, chain, size, num_prefix_tokens, num_output_tokens):
        if not chain:
            return
        n = len(chain)
        num_hit = sum(prefix <= num_prefix_tokens for prefix, _ in chain)
        num_known, last = n, None
        while num_known > 0:
            last = self.ghost_of(self.keys[chain[num_known - 1][1]])
            if last or num_known == num_hit:
                break
            num_known -= 1
        continues = num_known > 0 and last is not None and last.is_end
        turn = last.turn + 1 if continues else 0
        gap = self.clock - last.time if continues else 0
        num_shared = self.release_fork(chain, 0 if continues else num_known)
        if num_shared < n:
            added = (n - num_known) * size
            own = 0 if turn == 0 else 1 + sum(gap >= t for t in (12e3, 30e3, 120e3, 480e3))
            own = 3 * own + (added >= 2560) + (added >= 20_480)
            own = 4 * own + sum(num_output_tokens >= limit for limit in (100, 300, 1000))
            self.release_segment(chain, num_shared, n, own, 0, turn)
        self.num_releases += 1
        if self.num_releases % 32 == 0:
            self.learn()

    def release_fork(self, chain, num_to_fork):
        segment = self.segment_of.get(chain[num_to_fork - 1][1]) if num_to_fork else None
        num_shared = self.release_shared(chain, num_to_fork)
        if segment and segment.reuse_class < self.NUM_OWN:
            is_later_turn = self.LEVELS[segment.reuse_class][0] > 0
            members = [i for i, each in self.segment_of.items() if each is segment]
            if is_later_turn and members and not self.guard.follows_lru:
                self.leave_behind(sorted(members, key=self.order.get), segment)
        return num_shared

    def leave_behind(self, members, segment):
        left = self.open(self.clock, self.LEFT, 0, segment.cost)
        for i in members:
            self.assign(i, left)
            ghost = self.ghost_of(self.keys[i])
            turn, is_end = (ghost.turn, ghost.is_end) if ghost else (0, False)
            self.note_release(self.keys[i], self.LEFT, turn, len(members), is_end, is_end)

    def release_shared(self, chain, num_to_fork):
        def segment(k):
            return self.segment_of.get(chain[k][1])

        def shares(k):
            return segment(k) is not None and self.NUM_OWN <= segment(k).reuse_class < self.LEFT

        num_shared = 0
        while num_shared < len(chain) and shares(num_shared):
            num_shared += 1
        num_shared = max(num_shared, num_to_fork)
        first = 0
        while first < num_shared:
            stop = first + 1
            while stop < num_shared and segment(stop) is segment(first):
                stop += 1
            forks = segment(first).num_forks if shares(first) else 0
            forks = max(1, forks + (first < num_to_fork <= stop))
            reuse_class = self.NUM_OWN + (forks >= 2) + (forks >= 4) + (forks >= 16)
            self.release_segment(chain, first, stop, reuse_class, forks, 0)
            first = stop
        return num_shared

    def release_segment(self, chain, first, stop, reuse_class, num_forks, turn):
        cost = 1.0
        if self.double_cost:
            cost = float(np.float32(1 + chain[(first + stop) // 2][0] / self.double_cost))
        level = None
        self.guard.begin_segment(self.clock, reuse_class, num_forks, cost)
        for k in reversed(range(first, stop)):
            _, i = chain[k]
            self.give(i)
            if self.level(i) != level:
                level = self.level(i)
                segment = self.open(self.clock, reuse_class, num_forks, cost)
            self.assign(i, segment)
            self.told.add(i)
            self.guard.note_release(self.keys[i])
            self.note_release(
                self.keys[i], reuse_class, turn, stop - first, k + 1 == stop, k + 1 == len(chain)
            )

    def note_release(self, key, reuse_class, turn, num_blocks, is_last, is_end):
        one_of = 1
        while num_blocks >= 64 * one_of * self.one_of and one_of < 128:
            one_of *= 2
        is_sample = key <= self.last_sampled // one_of
        if is_sample or is_last:
            ghost = Ghost(key, self.clock, reuse_class, min(turn, 3), is_sample, is_end)
            self.ghosts.append(ghost)
            self.youngest[key] = ghost
            self.num_ghosts += 1
            ghost.number = self.num_ghosts
            del self.ghosts[: -self.NUM_GHOSTS]
        if is_sample:
            self.reached[reuse_class][0] += 1

    def learn(self):
        # Only the youngest record of a key can be marked as used, but older records age as well.
        for ghost in self.ghosts:
            if not ghost.is_sample or ghost.is_used:
                continue
            while ghost.bucket + 1 < self.NUM_BUCKETS:
                if self.clock - ghost.time < self.begin[ghost.bucket + 1]:
                    break
                ghost.bucket += 1
                self.reached[ghost.reuse_class][ghost.bucket] += 1
        for of_class in self.reached + self.used:
            of_class[:] = [0.997 * count for count in of_class]
        if self.num_releases < 1024 or self.num_releases % 128 == 0:
            self.solve()

    def solve(self):
        classes, buckets = range(self.LOOSE + 1), range(self.NUM_BUCKETS)
        pooled = []
        for b in buckets:
            used = reached = 0.0
            for c in classes:
                reached += self.reached[c][b]
                used += self.used[c][b]
            hazard = min((used + 30 * 0.02) / (reached + 30), 1.0)
            pooled.append(max(hazard, 0.8 * pooled[-1]) if pooled else hazard)
        self.hazards, self.index = [None] * (self.LOOSE + 1), [None] * (self.LOOSE + 1)
        unknown = pooled, self.index_of(pooled)
        self.fit([(self.reached[c], self.used[c]) for c in range(self.NUM_OWN)], pooled)
        for c in classes:
            found = unknown
            if c < self.NUM_OWN:
                found = self.together(c, self.reached[c], self.used[c], unknown)
            elif any(self.reached[c]):
                found = self.solved(self.reached[c], self.used[c], unknown[0])
            self.hazards[c], self.index[c] = found

    def expected(self, own, b, of_all):
        gap, added, answer = self.LEVELS[own]
        of_answer, of_added, of_gap = self.factors
        return min(
            of_all * of_answer[answer][b // 4] * of_added[added][b // 4] * of_gap[gap][b // 4], 0.98
        )

    def fit(self, counts, of_all):
        for _ in range(2):
            for feature, of_feature in enumerate(self.factors):
                observed = [[0.0] * 7 for _ in range(6)]
                expected = [[0.0] * 7 for _ in range(6)]
                for own, (reached, used) in enumerate(counts):
                    level = self.LEVELS[own][2 - feature]
                    for b in range(self.NUM_BUCKETS):
                        if reached[b]:
                            observed[level][b // 4] += used[b]
                            expected[level][b // 4] += reached[b] * self.expected(own, b, of_all[b])
                for level, r in itertools.product(range(6), range(7)):
                    factor = of_feature[level][r]
                    factor *= (observed[level][r] + 30) / (expected[level][r] + 30)
                    of_feature[level][r] = min(max(factor, 0.001), 100.0)

    def together(self, own, reached, used, unknown):
        """Return (hazards, index) for a class of a request's own blocks."""
        if not any(reached):
            return unknown
        prior = [self.expected(own, b, unknown[0][b]) for b in range(self.NUM_BUCKETS)]
        return self.solved(reached, used, prior)

    def solved(self, reached, used, prior):
        hazards = [
            min((used[b] + 60 * prior[b]) / (reached[b] + 60), 1.0) for b in range(self.NUM_BUCKETS)
        ]
        return hazards, self.index_of(hazards)

    def index_of(self, hazards):
        return [self.best_rate(hazards, first) for first in range(self.NUM_BUCKETS)]

    def best_rate(self, hazards, first):
        alive, hits, ticks, best_hits, best_ticks = 1.0, 0.0, 0.0, 0.0, 1.0
        for b in range(first, self.NUM_BUCKETS):
            hits += alive * hazards[b]
            ticks += alive * (self.begin[b + 1] - self.begin[b]) * (1 - hazards[b] / 2)
            alive *= 1 - hazards[b]
            if hits * best_ticks > best_hits * ticks:
                best_hits, best_ticks = hits, ticks
        return best_hits / best_ticks

    def on_idle(self, i):
        if i not in self.told:
            level = self.level(i)
            self.loose[level] = self.joined(self.loose.get(level), self.LOOSE)
            self.assign(i, self.loose[level])
            if i in self.keys:
                self.guard.note_loose(self.keys[i])
        self.told.discard(i)
        if i in self.keys:
            self.guard.note_idle(self.keys[i])

    def on_forget(self, i, key, evicted):
        if not evicted:
            self.guard.forget(self.keys.get(i))
        self.segment_of.pop(i, None)
        self.given.pop(i, None)
        self.tenants.pop(i, None)
        self.keys.pop(i, None)
        self.told.discard(i)


MODELS = {
    "last_access": LastAccess,
    "learned": Learned,
    "lru": Lru,
    "priority": Priority,
}
