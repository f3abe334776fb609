# SPDX-License-Identifier: Apache-2.0
"""What a caller sees of the eviction policy `learned`."""

import itertools

import numpy as np
import pytest

from kvcache import BlockPool, GroupSpec, KVCacheManager, Request
from kvcache.allocator import check_invariants
from kvcache_lab import Replayer
from tests.machinery.mixed_prompts import mixed_prompts
from tests.machinery.shared import sampled


def test_priority_takes_precedence_over_the_learned_value():
    """The block with the lowest unexpired priority is evicted first."""
    manager = KVCacheManager(16, 7, 64, num_preallocate_tokens=0, eviction="learned")
    manager.cache.set_now(1)
    for name, first, retention in (
        ("high", 100, [(0, 32, 90, 5.0)]),
        ("plain", 200, []),
        ("low", 0, [(0, 32, 10, None)]),
    ):
        request = Request(name, range(first, first + 32))
        manager.step(new=[request])
        manager.free(request, retention=retention)

    def cached(first):
        return manager.cache.find_prefix(Request("probe", range(first, first + 33))).num_tokens

    assert [cached(first) for first in (0, 100, 200)] == [32, 32, 32]
    manager.step(new=[Request("x", range(300, 332))])
    assert [cached(first) for first in (0, 100, 200)] == [0, 32, 32]
    manager.cache.set_now(6)  # the priority of "high", the oldest, has expired
    manager.step(new=[Request("y", range(400, 432))])
    assert [cached(first) for first in (100, 200)] == [0, 32]
    check_invariants(manager)


class Chats:
    """Serves prompts one at a time, at given times in seconds."""

    def __init__(self, num_blocks=200, **options):
        self.manager = KVCacheManager(
            16, num_blocks, 2**16, num_preallocate_tokens=0, eviction="learned", **options
        )
        self.manager.cache.set_now(0)

    def serve(self, seconds, tokens, answer=0, **options):
        """Return the number of tokens hit."""
        self.manager.cache.set_now(seconds)
        request = Request(f"at {seconds}", tokens)
        plan = self.manager.step(new=[request])
        self.manager.free(request, num_output_tokens=answer, **options)
        return int(plan.num_computed_tokens[0])


def loops(rng):
    """Yield prompts that recur in a cycle, and prompts that recur at once and then never again."""
    time = number = 0
    while True:
        kind, span = rng.integers(2), int(rng.integers(4, 12))
        for i in range(int(rng.integers(100, 400))):
            time += float(rng.choice([0.01, 1, 15, 200]))
            if kind:
                first = i % span
            else:
                number += int(rng.integers(0, 2))
                first = 1000 + number - int(rng.integers(0, 3))
            yield time, range(100_000 * first, 100_000 * first + 16 * int(rng.integers(1, 8)))


def bound(num_hits_of_lru, num_blocks):
    """Return how many hits fewer than LRU the policy may have (docs/eviction.md)."""
    return 0.004 * num_hits_of_lru + (1 + 1 / 8) * (num_blocks - 1) + 1


@pytest.mark.parametrize("seed", sampled(range(12)))
def test_hits_lost_to_lru_are_bounded_while_other_requests_hold_blocks(seed):
    """Each request holds its blocks until a random number of other requests has arrived."""
    rng = np.random.default_rng(seed)
    num_blocks = int(rng.integers(80, 120))
    learned, lru = (
        KVCacheManager(16, num_blocks, 2**16, num_preallocate_tokens=0, eviction=eviction)
        for eviction in ("learned", "lru")
    )
    learned.cache.set_now(0)
    behind = num_hits = 0
    running = []
    for i, (time, tokens) in enumerate(itertools.islice(loops(rng), 4_000)):
        learned.cache.set_now(time)
        request = Request(str(i), tokens)
        plans = [manager.step(new=[request]) for manager in (learned, lru)]
        assert [plan.status[0] for plan in plans] == [0, 0]
        hits = [int(plan.num_computed_tokens[0]) // 16 for plan in plans]
        behind += hits[1] - hits[0]
        num_hits += hits[1]
        running.insert(int(rng.integers(0, len(running) + 1)), request)
        if len(running) > 6:
            ended = running.pop()
            learned.free(ended)
            lru.free(ended)
        assert behind <= bound(num_hits, num_blocks)


GROUPS = {
    "states": [GroupSpec("full_attention", 16), GroupSpec("recurrent", 16)],
    "windows": [GroupSpec("full_attention", 16), GroupSpec("sliding_window", 16, {"window": 32})],
    "host": [GroupSpec("full_attention", 16)],
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 14, 19, 22])
@pytest.mark.parametrize("kind", ["device", *GROUPS])
def test_few_hits_are_lost_when_the_workload_keeps_changing(kind, seed):
    """The bound permits larger losses, and does not apply to windows, states and the host."""
    prompts = mixed_prompts(seed, 2_500)
    num_blocks = int(np.random.default_rng(seed).integers(60, 300))
    hits = []
    for eviction in ("learned", "lru"):
        host = {"num_host_blocks": 101, "host_eviction": eviction}
        replayer = Replayer(
            groups=GROUPS.get(kind, GROUPS["host"]), num_blocks=num_blocks, chunk_tokens=64,
            retention_interval=None if kind in ("device", "host") else 0, eviction=eviction,
            **host if kind == "host" else {},
        )  # fmt: skip
        hits.append(replayer.run(prompts).hit_tokens)
    assert hits[0] >= 0.988 * hits[1]


@pytest.mark.parametrize("seed", sampled(range(4)))
def test_random_calls_with_states_and_windows_keep_the_invariants(seed):
    rng = np.random.default_rng(seed)
    manager = KVCacheManager.for_groups(
        GROUPS["states" if seed % 2 else "windows"], 60, 2**16, num_preallocate_tokens=0,
        eviction="learned",
    )  # fmt: skip
    running = []
    for i, (time, tokens) in enumerate(itertools.islice(loops(rng), 400)):
        manager.cache.set_now(time)
        request = Request(str(i), tokens)
        while manager.step(new=[request]).status[0] != 0:
            manager.free(running.pop())
        running.insert(int(rng.integers(0, len(running) + 1)), request)
        if len(running) > 3:
            manager.free(running.pop())
        if rng.random() < 0.02:
            manager.cache.evict(rng.integers(1, 60, 5))
        check_invariants(manager)


def block_tokens(number, num_blocks):
    return [*range(20_000 * number, 20_000 * number + 16 * num_blocks)]


def prompts_with_a_shared_prefix():
    """Yield a 40-block prefix, each time with different blocks after it and followed by six short
    prompts that never recur.
    """
    prefix = block_tokens(1, 40)
    for number in itertools.count(10, 7):
        yield prefix + block_tokens(number, 40), 0
        for other in range(1, 7):
            yield block_tokens(number + other, 10), 1000


def conversations_left_behind():
    """Yield prompts in cycles. Each cycle forks the previous conversation inside its second turn, and
    then repeats the same ten prompts.
    """
    before = None
    for number in itertools.count(50):
        if before is not None:
            yield before[: 16 * 8] + [7] * 17, 0
        head = block_tokens(number, 4)
        before = head + [*range(20_000 * number + 10_000, 20_000 * number + 11_600)]
        yield from ((head, 0), (before, 0))
        for i in range(10):
            yield [*block_tokens(i, 8), 1], 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "c"), [(prompts_with_a_shared_prefix, 100), (conversations_left_behind, 200)]
)
def test_hits_lost_to_lru_are_bounded_with_prefixes_and_forks(prompts, c):
    learned, lru = Chats(c + 1), Chats(c + 1)
    lru.manager = KVCacheManager(16, c + 1, 2**16, num_preallocate_tokens=0)
    behind = num_hits = 0
    for time, (tokens, answer) in enumerate(itertools.islice(prompts(), 4_000)):
        hits = [each.serve(time, tokens, answer) // 16 for each in (learned, lru)]
        behind += hits[1] - hits[0]
        num_hits += hits[1]
        assert behind <= bound(num_hits, c + 1)


def scans_and_chats():
    """Yield two-turn conversations of 3 blocks among prompts of 10 blocks that never recur."""
    for number in itertools.count():
        yield 10 * number, block_tokens(2 * number, 2), 0
        if number >= 30:
            yield 10 * number + 3, [*block_tokens(2 * number - 60, 2), *range(16)], 0
        for i in range(2):
            yield 10 * number + 6, block_tokens(100_000 + 2 * number + i, 10), 1000


@pytest.mark.parametrize("with_times", [True, False])
def test_policy_finds_what_is_reused(with_times):
    """LRU keeps too few blocks for any hit. Without times, the order of the requests is the clock."""
    chats = Chats(401)
    hits = [
        chats.serve(time if with_times else 0, tokens, answer)
        for time, tokens, answer in itertools.islice(scans_and_chats(), 4_000)
    ]
    assert sum(hits[-1_000:]) > 0.6 * 250 * 32
    assert not chats.manager.cache.stats.falls_back
    check_invariants(chats.manager)


def prompts_of_which_a_quarter_is_continued():
    """Yield times, prompts and whether they end a turn. Nothing else distinguishes the prompts."""
    for number in itertools.count():
        yield 10 * number, block_tokens(number, 10), number % 4 != 0
        if number >= 60 and number % 4 == 0:
            yield 10 * number + 5, [*block_tokens(number - 60, 10), *range(16)], True


def test_policy_learns_from_ends_of_turns():
    """A pool of 40 prompts keeps those that are continued after 60 others, if it is told which."""

    def num_hits(is_told):
        chats = Chats(401)
        prompts = itertools.islice(prompts_of_which_a_quarter_is_continued(), 3_000)
        hits = [
            chats.serve(time, tokens, ends_turn=ends if is_told else None)
            for time, tokens, ends in prompts
        ]
        return sum(hits[-1_000:])

    assert num_hits(is_told=True) > 0.9 * 200 * 160 > 2 * num_hits(is_told=False)
    with pytest.raises(TypeError, match="ends_turn is 1: expected True or False"):
        Chats().serve(0, range(16), ends_turn=1)


def test_policy_follows_lru_while_its_own_order_gains_nothing():
    """Every prompt recurs soon, so LRU has all hits."""
    learned, lru = Chats(101), Chats(101)
    lru.manager = KVCacheManager(16, 101, 2**16, num_preallocate_tokens=0)
    for time in range(2_000):
        tokens = block_tokens(time // 40 * 20 + time % 20, 4)
        assert learned.serve(time, tokens) == lru.serve(time, tokens)
        assert learned.manager.cache.stats.falls_back
    assert lru.manager.cache.stats.falls_back is None


def test_equal_calls_at_equal_times_cause_equal_evictions():
    def events():
        chats = Chats(201)
        return [chats.serve(*each) for each in itertools.islice(scans_and_chats(), 2_000)]

    assert events() == events()


def test_memory_per_block():
    """4 bytes per block and 32 per segment, in addition to 4 in the pool's tree of candidates."""

    def num_bytes(num_blocks, eviction):
        return BlockPool(num_blocks, eviction).num_bytes

    extra = [num_bytes(n, "learned") - num_bytes(n, "lru") for n in (100_001, 200_001)]
    assert extra[1] - extra[0] == 8 * 100_000
    assert extra[0] - 8 * 100_000 < 310_000


@pytest.mark.slow
def test_recomputed_last_block_does_not_count_as_a_lost_hit():
    """At least one token must be computed after a hit, so the block of that token is then cached
    twice.
    """
    chats, lru, hits = Chats(101), Chats(101), [0, 0]
    lru.manager = KVCacheManager(16, 101, 2**16, num_preallocate_tokens=0)
    for time in range(20_000):
        for i, each in enumerate((chats, lru)):
            hits[i] += each.serve(time, block_tokens(time % 20, 2))
    assert hits[0] == hits[1] > 0
