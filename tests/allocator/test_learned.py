# SPDX-License-Identifier: Apache-2.0
"""The counts learned by the eviction policy `learned`: how they are reported, given to
another manager and validated.
"""

import itertools
import math

import numpy as np
import pytest

from kvcache import Admit, GroupSpec, KVCacheManager, LearnedReuse, Request
from kvcache.allocator import check_invariants
from kvcache.compat import BlockSpaceManager
from kvcache_lab import Replayer, chat_workload
from tests.machinery.mixed_prompts import mixed_prompts
from tests.machinery.shared import sampled

ONES = np.ones((82, 26))


def trained(num_requests=400, num_blocks=400):
    replayer = Replayer(block_size=16, num_blocks=num_blocks, eviction="learned")
    replayer.run(chat_workload(num_requests))
    return replayer.manager


def equal(one, two):
    return np.array_equal(one.reached, two.reached) and np.array_equal(one.used, two.used)


def test_stats_show_the_learned_counts():
    learned = trained().cache.stats.learned
    assert learned.reached.shape == learned.used.shape == (82, 26)
    assert learned.used.sum() > 50 and learned.reached[:, 0].sum() > learned.used.sum()
    assert learned.reached[72:76].sum() > 0  # system prompts are shared
    with pytest.raises(ValueError, match="read-only"):
        learned.used[0, 0] = 1
    assert KVCacheManager(16, 9, 64).cache.stats.learned is None
    assert BlockSpaceManager(16, 9, 9).stats.learned is None


def test_learned_counts_are_given_to_another_manager():
    learned = trained().cache.stats.learned
    manager = KVCacheManager(16, 400, 2**20, eviction="learned")
    manager.cache.learn_from(learned)
    assert equal(manager.cache.stats.learned, learned)
    manager.cache.learn_from(None)
    assert equal(manager.cache.stats.learned, learned)


def test_given_counts_change_evictions():
    """Prompts of the older prompt's class have been reused, and those of the younger prompt's class
    never.
    """
    reached, used = np.zeros((82, 26)), np.zeros((82, 26))
    # Class 0 has answers shorter than 100 tokens, and class 1 has longer ones.
    reached[0] = reached[1] = 1000
    used[1] = 500
    for learned in (None, LearnedReuse(reached, used)):
        manager = KVCacheManager(16, 5, 64, num_preallocate_tokens=0, eviction="learned")
        manager.cache.learn_from(learned)
        for name, first, answer in (("a", 0, 100), ("b", 100, 0)):
            request = Request(name, range(first, first + 32))
            manager.step(new=[request])
            manager.free(request, num_output_tokens=answer)
        manager.step(new=[Request("c", range(200, 232))])
        survives = manager.cache.find_prefix(Request("again", range(33))).num_tokens == 32
        assert survives == (learned is not None)


@pytest.mark.parametrize(
    ("reached", "used", "says"),
    [
        ([[1.0]], ONES, r"reached has shape \[1, 1\]: expected \[82, 26\]"),
        (ONES, None, r"used has shape \[\]"),
        (ONES, "x", "used is not an array of numbers"),
        (-ONES, ONES, "reached has numbers that are not counts"),
        (np.nan * ONES, ONES, "reached has numbers that are not counts"),
        (1e300 * ONES, ONES, "reached has numbers that are not counts"),
        (ONES, np.inf * ONES, "used has numbers that are not counts"),
        (ONES, [[1.0], [1.0, 2.0]], "used is not an array of numbers"),
    ],
)
def test_invalid_counts_are_rejected(reached, used, says):
    with pytest.raises(ValueError, match=says):
        LearnedReuse(reached, used)


def test_numbers_outside_the_range_of_floats_are_reported():
    for value in (10**400, 10**5000):
        with pytest.raises(ValueError, match=r"^reached is not an array of numbers \("):
            LearnedReuse([[value]], [[1]])


def test_invalid_call_is_reported_and_changes_nothing():
    manager = KVCacheManager(16, 9, 64, eviction="learned")
    before = manager.cache.stats.learned
    with pytest.raises(TypeError, match="learned has type dict: expected LearnedReuse or None"):
        manager.cache.learn_from({"reached": ONES, "used": ONES})
    assert equal(manager.cache.stats.learned, before)
    plain = KVCacheManager(16, 9, 64)
    with pytest.raises(
        ValueError, match="the eviction policy collects no counts: expected 'learned'"
    ):
        plain.cache.learn_from(before)
    with pytest.raises(ValueError, match="used has numbers that are not counts: expected 0 to"):
        LearnedReuse(np.zeros((82, 26)), -np.ones((82, 26)))


def test_priority_takes_precedence_over_the_learned_value():
    """The block with the lowest unexpired priority is evicted first.

    Among blocks of equal priority, the one least likely to be reused is evicted first.
    """
    manager = KVCacheManager(16, 7, 64, num_preallocate_tokens=0, eviction="learned")
    reached, used = np.zeros((82, 26)), np.zeros((82, 26))
    reached[0] = reached[1] = 1000
    used[1] = 500  # requests with long answers are continued
    manager.cache.learn_from(LearnedReuse(reached, used))
    manager.cache.set_now(1)
    for name, first, answer, retention in (
        ("low", 0, 100, [(0, 32, 10, None)]),
        ("high", 100, 0, [(0, 32, 90, 5.0)]),
        ("plain", 200, 100, []),
    ):
        request = Request(name, range(first, first + 32))
        manager.step(new=[request])
        manager.free(request, num_output_tokens=answer, retention=retention)

    def cached(first):
        return manager.cache.find_prefix(Request("probe", range(first, first + 33))).num_tokens

    assert [cached(first) for first in (0, 100, 200)] == [32, 32, 32]
    manager.step(new=[Request("x", range(300, 332))])
    assert [cached(first) for first in (0, 100, 200)] == [0, 32, 32]
    # The priority of "high" has expired, and prompts of its class are never reused.
    manager.cache.set_now(6)
    manager.step(new=[Request("y", range(400, 432))])
    assert [cached(first) for first in (100, 200)] == [0, 32]
    check_invariants(manager)


def flooded(share):
    """Return how many tokens of one tenant stay cached after another tenant has sent 200 prompts."""
    manager = KVCacheManager(
        16, 101, 64, num_preallocate_tokens=0, eviction="learned",
        eviction_options={"tenant_share": share},
    )  # fmt: skip

    def serve(name, first, salt, num_tokens=48):
        request = Request(name, range(first, first + num_tokens), cache_salt=salt)
        plan = manager.step(new=[request])
        manager.free(request)
        return int(plan.num_computed_tokens[0])

    # The policy has learned that prompts from "flood" recur, and has seen no reuse of prompts from
    # "mine".
    for _ in range(20):
        for number in range(3):
            serve("warm", 100 * number, "flood")
    serve("mine", 0, "mine")
    for number in range(200):
        for _ in range(2):
            serve("flood", 100 * number, "flood")
    check_invariants(manager)
    return manager.cache.find_prefix(Request("probe", range(49), cache_salt="mine")).num_tokens


def test_tenant_keeps_at_most_its_share_while_others_need_space():
    assert flooded(1) == 0
    assert flooded(0.8) == 48


def test_requests_without_salt_have_no_share():
    manager = KVCacheManager(
        16, 11, 64, num_preallocate_tokens=0, eviction="learned",
        eviction_options={"tenant_share": 0},
    )  # fmt: skip
    for name, salt in (("a", "x"), ("b", None), ("c", "y")):
        request = Request(name, range(48), cache_salt=salt)
        manager.step(new=[request])
        manager.free(request)
    # The request needs 4 blocks, and only 1 was free.
    manager.step(new=[Request("d", range(500, 564))])

    def left(salt):
        return manager.cache.find_prefix(Request("probe", range(49), cache_salt=salt)).num_tokens

    assert left(None) == 48 and left("x") + left("y") == 48
    with pytest.raises(ValueError, match=r"option 'tenant_share' is 1\.5: expected 0 to 1"):
        KVCacheManager(16, 9, 64, eviction="learned", eviction_options={"tenant_share": 1.5})
    names = "one of the options 'double_cost_tokens', 'tenant_share', 'state_share'"
    with pytest.raises(ValueError, match=names):
        KVCacheManager(16, 9, 64, eviction="learned", eviction_options={"share": 1})


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

    def rows(self):
        """Return the number of sampled blocks in each class."""
        reached = self.manager.cache.stats.learned.reached[:, 0]
        return {int(row): round(reached[row]) for row in reached.nonzero()[0]}


def test_classes_of_later_turns_depend_on_the_time_since_the_previous_one():
    chats, prompt, seconds = Chats(), [], 0
    for turn, gap in enumerate([0, 11, 29, 119, 479, 480]):
        seconds += gap
        prompt += range(1000 * turn, 1000 * turn + 32)
        chats.serve(seconds, prompt, answer=[0, 100, 300, 1000, 0, 0][turn])
    # The row is 12 * (class of the gap) + (class of the answer). Each turn has two more blocks than
    # the previous one.
    assert chats.rows() == {0: 2, 13: 4, 26: 6, 39: 8, 48: 10, 60: 12}


def test_blocks_after_a_fork_inside_a_later_turn_count_as_abandoned():
    chats = Chats()
    chats.serve(0, range(64))
    chats.serve(5, range(128))  # the conversation continues
    chats.serve(9, [*range(96), *range(1000, 1032)])  # a fork after six of eight blocks
    # Row 72 has the six shared blocks, and row 76 the two abandoned ones. Row 0 includes the new
    # branch.
    assert chats.rows() == {0: 4 + 2, 12: 8, 72: 6, 76: 2}
    chats.serve(20, range(128))  # the abandoned blocks are used again
    learned = chats.manager.cache.stats.learned
    assert learned.used[76].sum() == 2
    check_invariants(chats.manager)


def test_fork_inside_a_first_turn_abandons_no_blocks():
    """Two conversations share the document, so the first one may still continue."""
    chats = Chats()
    chats.serve(0, range(128))
    chats.serve(9, [*range(96), *range(1000, 1032)])
    assert 76 not in chats.rows()


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


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(12)))
def test_hits_lost_to_lru_are_bounded(seed):
    """The policy starts with wrong counts, and it samples all blocks of the pool."""
    rng = np.random.default_rng(seed)
    num_blocks = int(rng.integers(20, 60))
    learned, lru = Chats(num_blocks), Chats(num_blocks)
    lru.manager = KVCacheManager(16, num_blocks, 2**16, num_preallocate_tokens=0)
    reached, used = np.full((82, 26), 1e6), rng.choice([0, 9e5], (82, 26))
    learned.manager.cache.learn_from(LearnedReuse(reached, used))
    behind = num_uses = 0
    c = num_blocks - 1
    for time, tokens in itertools.islice(loops(rng), 4_000):
        answer = int(rng.choice([0, 100, 300, 1000]))
        behind += (lru.serve(time, tokens, answer) - learned.serve(time, tokens, answer)) // 16
        num_uses += len(tokens) // 16
        assert behind <= 1.25 * c * (2 + math.log2(1 + num_uses / (2 * c)))


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
    reached, used = np.full((82, 26), 1e6), rng.choice([0, 9e5], (82, 26))
    learned.cache.learn_from(LearnedReuse(reached, used))
    behind = num_uses = 0
    c, running = num_blocks - 1, []
    for i, (time, tokens) in enumerate(itertools.islice(loops(rng), 4_000)):
        learned.cache.set_now(time)
        request = Request(str(i), tokens)
        plans = [manager.step(new=[request]) for manager in (learned, lru)]
        assert [plan.status[0] for plan in plans] == [0, 0]
        hits = [int(plan.num_computed_tokens[0]) // 16 for plan in plans]
        behind += hits[1] - hits[0]
        num_uses += len(tokens) // 16
        running.insert(int(rng.integers(0, len(running) + 1)), request)
        if len(running) > 6:
            ended = running.pop()
            learned.free(ended)
            lru.free(ended)
        assert behind <= 1.25 * c * (2 + math.log2(1 + num_uses / (2 * c)))


GROUPS = {
    "states": [GroupSpec("full_attention", 16), GroupSpec("recurrent", 16)],
    "windows": [
        GroupSpec("full_attention", 16),
        GroupSpec("sliding_window", 16, {"window": 32}),
    ],
    "host": [GroupSpec("full_attention", 16)],
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 14, 20, 22])
@pytest.mark.parametrize("kind", ["device", *GROUPS])
def test_few_hits_are_lost_when_the_workload_keeps_changing(kind, seed):
    """The policy may be behind LRU by the bound of its guard, which is larger than this."""
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
    assert hits[0] >= 0.955 * hits[1]


def test_hits_that_a_request_declines_are_not_compared_with_lru():
    manager = KVCacheManager.for_groups(
        GROUPS["windows"], 60, 2**16, num_preallocate_tokens=0, eviction="learned"
    )
    for i in range(100):
        manager.cache.set_now(i)
        request = Request(str(i), range(129))
        manager.admit(Admit(request, num_tokens=129), [[], []])
        manager.free(request)
        assert not manager.cache.stats.falls_back


def states_of(manager, prompts):
    """Return which prompts still have their state: only then can they be hit."""
    found = [
        manager.cache.find_prefix(Request(f"probe {i}", [*each, 0])).num_tokens
        for i, each in enumerate(prompts)
    ]
    return [num_tokens > 0 for num_tokens in found]


def test_states_beyond_their_share_are_evicted_first():
    """Each prompt leaves four blocks and one state. Two of the 20 blocks may be states."""
    manager = KVCacheManager.for_groups(
        GROUPS["states"], 21, 2**16, num_preallocate_tokens=0, eviction="learned",
        eviction_options={"state_share": 0.1},
    )  # fmt: skip
    prompts = [[*range(1000 * i, 1000 * i + 64)] for i in range(5)]
    for i, prompt in enumerate(prompts[:4]):
        manager.cache.set_now(i)
        request = Request(str(i), prompt)
        manager.step(new=[request])
        manager.free(request)
    assert states_of(manager, prompts[:4]) == [True] * 4  # no block was needed
    request = Request("last", prompts[4])
    manager.step(new=[request])  # needs five blocks
    manager.free(request)
    assert sum(states_of(manager, prompts)) == 3  # two idle ones, and one that was held
    check_invariants(manager)


def test_share_of_states_prefers_states_of_long_prompts():
    manager = KVCacheManager.for_groups(
        GROUPS["states"], 61, 2**16, num_preallocate_tokens=0, eviction="learned",
        eviction_options={"state_share": 0.02},
    )  # fmt: skip
    prompts = [[*range(1000 * i, 1000 * i + 16 * n)] for i, n in enumerate((5, 20, 5, 10))]
    for i, prompt in enumerate(prompts):
        request = Request(str(i), prompt)
        manager.step(new=[request])
        manager.free(request)
    request = Request("last", range(90_000, 90_000 + 16 * 20))
    manager.step(new=[request])
    assert states_of(manager, prompts) == [False, True, False, False]
    with pytest.raises(ValueError, match=r"option 'state_share' is -1: expected 0 to 1"):
        KVCacheManager(16, 9, 64, eviction="learned", eviction_options={"state_share": -1})


@pytest.mark.parametrize("seed", sampled(range(4)))
def test_random_calls_with_a_share_of_states_keep_the_invariants(seed):
    rng = np.random.default_rng(seed)
    manager = KVCacheManager.for_groups(
        GROUPS["states" if seed % 2 else "windows"], 60, 2**16, num_preallocate_tokens=0,
        eviction="learned", eviction_options={"state_share": float(rng.choice([0, 0.05, 0.3]))},
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
    ("prompts", "c", "never_used"),
    [
        (prompts_with_a_shared_prefix, 100, [*range(72, 76), 0, 4, 8]),
        (conversations_left_behind, 200, [*range(72, 76), 2, 6, 10]),
    ],
)
def test_hits_lost_to_lru_are_bounded_with_prefixes_and_forks(prompts, c, never_used):
    """The initial counts wrongly state that the recurring prompts never recur."""
    learned, lru = Chats(c + 1), Chats(c + 1)
    lru.manager = KVCacheManager(16, c + 1, 2**16, num_preallocate_tokens=0)
    used = np.full((82, 26), 5e5)
    used[never_used] = 0
    learned.manager.cache.learn_from(LearnedReuse(np.full((82, 26), 1e6), used))
    behind = num_uses = 0
    for time, (tokens, answer) in enumerate(itertools.islice(prompts(), 4_000)):
        behind += (lru.serve(time, tokens, answer) - learned.serve(time, tokens, answer)) // 16
        num_uses += len(tokens) // 16
        assert behind <= 1.25 * c * (2 + math.log2(1 + num_uses / (2 * c)))


@pytest.mark.slow
def test_recomputed_last_block_does_not_count_as_a_lost_hit():
    """At least one token must be computed after a hit, so the block of that token is then cached
    twice.
    """
    chats, hits = Chats(101), []
    for time in range(20_000):
        chats.serve(time, block_tokens(time % 20, 2))
    for time in range(20_000, 24_000):  # LRU would have no hits in this loop
        hits.append(chats.serve(time, [*block_tokens(1000 + time % 30, 4), 1]) // 16)
    assert sum(hits[:2_000]) > 2_000
