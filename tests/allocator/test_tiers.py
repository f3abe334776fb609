# SPDX-License-Identifier: Apache-2.0
"""A device tier and a host tier: swapped rows, cached blocks on the host, pins, and eviction
policies selected by name.
"""

import numpy as np
import pytest

from kvcache import Admit, GroupSpec, KVCacheManager, Request, StepReport, eviction_names
from kvcache.allocator import RequestState, check_invariants
from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvcache.step import Status
from tests.machinery.shared import manager_of, sampled
from tests.machinery.steps import FULL, ids, new

NEW = Request("new", [1])


def make(num_blocks=6, num_host_blocks=20, groups=(FULL,), **options):
    return manager_of(*groups, num_blocks=num_blocks, num_host_blocks=num_host_blocks, **options)


def with_offloaded(**options):
    """Return an engine that served two prompts of 16 tokens, the first of which was partly evicted to
    the host.
    """
    engine = Engine(**options)
    engine.run("a", range(16))
    engine.run("b", range(100, 116))
    return engine


class Engine:
    """A manager whose steps are reported as completed immediately."""

    def __init__(self, **options):
        self.manager = make(**options)

    def step(self, *args, **options):
        plan = self.manager.step(*args, **options)
        self.manager.report(StepReport(plan.step_id, completed=True))
        check_invariants(self.manager)
        return plan

    def admit(self, name, tokens, **options):
        request = Request(name, tokens)
        return request, self.step(new=[Admit(request, **options)])

    def run(self, name, tokens):
        """Admit a request, run it to completion, and return the plan that admitted it."""
        request, plan = self.admit(name, tokens)
        self.manager.free(request)
        return plan


def test_only_blocks_expected_to_be_reused_are_written():
    """Prompts with short answers recur after 200 seconds, and prompts with long answers never."""
    learned = dict.fromkeys(("eviction", "host_eviction"), "learned")
    engine = Engine(num_blocks=17, num_host_blocks=41, min_gain_to_write=0.5, **learned)
    manager = engine.manager

    def serve(name, seconds, first, answer):
        manager.cache.set_now(seconds)
        request, _ = engine.admit(name, range(first, first + 16))
        manager.free(request, num_output_tokens=answer)

    for i in range(1_200):
        serve(f"short {i}", 10 * i, 100 * i, 0)
        serve(f"short {i} again", 10 * i + 3, 100 * (i - 20) if i > 20 else 10**7 + 100 * i, 0)
        serve(f"long {i}", 10 * i + 6, 10**8 + 100 * i, 1_000)
    host = manager.cache.stats.host
    assert host.declined_blocks > 0 < host.written_blocks
    assert host.loaded_blocks > 0.5 * host.written_blocks


# Hits on the host ----------------------------------------------------------------------------------


def test_evicted_blocks_are_hit_on_the_host():
    engine = Engine()
    engine.run("a", range(16))  # blocks 1 to 4
    plan = engine.run("b", range(100, 116))
    # The last blocks are evicted first; block 5 was never filled.
    assert plan.swap_out.tolist() == [[4, 1], [3, 2], [2, 3]]
    assert engine.manager.host_pool.num_cached == 3
    request, plan = engine.admit("a2", range(16))
    assert plan.num_computed_tokens.tolist() == [12]
    assert plan.swap_in[:, 0].tolist() == [3, 2]  # the first block is still on the device
    assert set(plan.swap_in[:, 1]) <= set(engine.manager.block_ids(request).tolist())
    stats = engine.manager.cache.stats
    assert stats.hit_tokens == 12
    assert stats.host_hit_tokens == stats.host.loaded_blocks * 4 == len(plan.swap_in) * 4


def test_caller_may_decline_host_hits():
    engine = with_offloaded()
    tokens = engine.manager.cache.cached_tokens(Request("probe", range(16)))
    assert tokens.with_host > tokens.on_device and tokens.num_host_blocks > 0
    most = tokens.num_host_blocks - 1
    _, plan = engine.admit("a2", range(16), max_host_blocks=most)
    assert len(plan.swap_in) == 0 and plan.num_computed_tokens.tolist() == [tokens.on_device]
    engine.manager.cache.start_epoch()  # clears both tiers
    assert engine.manager.host_pool.num_cached == engine.manager.pool.num_cached == 0
    assert engine.run("a3", range(16)).num_computed_tokens.tolist() == [0]


def test_write_through_writes_in_the_next_plan():
    engine = Engine(host_write="through")
    assert len(engine.run("a", range(9)).swap_out) == 0
    assert engine.step().swap_out.tolist() == [[2, 1], [1, 2]]  # the last blocks are written first
    assert len(engine.step().swap_out) == 0
    assert engine.manager.cache.stats.host.written_blocks == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", sampled([9, 6, 17]))
@pytest.mark.parametrize("policy", eviction_names())
def test_unbounded_host_tier_has_the_same_hits_as_an_unbounded_device(num_blocks, policy):
    rng = np.random.default_rng(num_blocks)
    prompts = []
    for _ in range(300):
        length = int(rng.integers(1, 20))
        prompts.append([i + 1000 * int(rng.integers(0, 2)) * (i >= 4) for i in range(length)])
    small = Engine(num_blocks=num_blocks, num_host_blocks=5000, eviction=policy)
    large = Engine(num_blocks=5000, num_host_blocks=2)
    for i, tokens in enumerate(prompts):
        found = [each.run(f"r{i}", tokens).num_computed_tokens[0] for each in (small, large)]
        assert found[0] == found[1]
    assert small.manager.cache.stats.host_hit_tokens > 0


def test_events_and_statistics_report_the_tier():
    engine = Engine(enable_events=True)
    engine.run("a", range(9))
    engine.run("b", range(100, 117))
    events = engine.manager.cache.drain_events()
    kinds = [(type(each), each.medium) for each in events]
    assert (BlockStored, "gpu") in kinds
    assert (BlockRemoved, "gpu") in kinds
    stored = next(each for each in events if isinstance(each, BlockStored) and each.medium == "cpu")
    assert stored.parent_hash is None
    assert len(stored.token_ids) == 0
    assert stored.block_hashes.shape == (2, 32)
    engine.manager.cache.reset()
    cleared = engine.manager.cache.drain_events()
    assert cleared == [AllBlocksCleared("gpu"), AllBlocksCleared("cpu")]


# Swapped-out rows ------------------------------------------------------------------------------------


def test_row_is_swapped_out_and_returns_when_it_is_served():
    engine = Engine(num_blocks=9)
    manager = engine.manager
    request, _ = engine.admit("a", range(10))
    row = manager.row(request)
    plan = engine.step(swap_out=[row])
    assert plan.status.tolist() == [Status.SERVED]
    assert plan.swap_out.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert manager.state(request) is RequestState.SWAPPED_OUT
    assert manager.pool.num_free == manager.pool.num_total
    assert manager.num_computed_tokens(request) == 10
    plan = engine.step([row], [3])
    assert plan.num_computed_tokens.tolist() == [10]
    assert plan.swap_in[:, 0].tolist() == [1, 2, 3]
    assert plan.clear_rows.tolist() == plan.append_rows.tolist() == [row]
    assert plan.append_ids[0].tolist() == manager.block_ids(request).tolist()
    assert plan.append_ids[0].tolist()[:3] == plan.swap_in[:, 1].tolist()
    assert manager.state(request) is not RequestState.SWAPPED_OUT
    assert manager.host_pool.num_free == manager.host_pool.num_total


@pytest.mark.parametrize(("call", "message"), [
    (lambda m: m.step(swap_out=[7]), "row 7 is not in use"),
    (lambda m: m.step([0], [1], swap_out=[0]), "swap_out contains row 0, which rows"),
    (lambda m: m.step(swap_out=[0, 0]), "swap_out contains row 0, which"),
    (lambda m: m.step(swap_out=[1]), "row 1 is swapped out"),
    (lambda m: m.block_ids(m.away), "row 1 is swapped out"),
    (lambda m: m.fork(m.away, Request("c", range(50, 59))), "row 1 is swapped out"),
    (lambda m: m.step(new=[Admit(NEW, max_host_blocks=-1)]), "max_host_blocks is -1"),
    (lambda m: m.admit(Admit(NEW, max_host_blocks=1)), "is 1: expected None, because admit"),
    (lambda m: m.report(StepReport(0, True, failed_host_pages=[0])), "failed_host_pages holds"),
])  # fmt: skip
def test_invalid_swaps_are_rejected_and_change_nothing(call, message):
    manager = make(num_blocks=12)
    manager.away = Request("b", range(50, 59))
    manager.step(new=[Request("a", range(9)), manager.away])
    manager.step(swap_out=[1])
    before = (manager.pool.num_free, manager.host_pool.num_free)
    with pytest.raises(ValueError, match=message):
        call(manager)
    assert (manager.pool.num_free, manager.host_pool.num_free) == before
    assert not manager.cache.reset()
    check_invariants(manager)


def test_swaps_are_rejected_without_a_host_tier():
    manager = KVCacheManager(4, 10, 64)
    manager.step(new=[Request("a", range(9))])
    assert manager.host_pool is None
    assert manager.cache.stats.host is None
    with pytest.raises(ValueError, match="there is no host tier: expected num_host_blocks"):
        manager.step(swap_out=[0])
    with pytest.raises(ValueError, match="there is no host tier"):
        manager.report(StepReport(0, True, failed_host_pages=[1]))


HOST = {"num_host_blocks": 9}
LEARNED = HOST | {"eviction": "learned", "host_eviction": "learned"}


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"host_write": "x"}, ValueError, "host_write is 'x': expected 'back' or 'through'"),
    ({"eviction": "oldest"}, ValueError, "eviction is 'oldest': expected one of last_access"),
    ({"eviction_options": {"x": 1}}, ValueError, "option 'x' is 1: expected no options"),
    (HOST | {"host_eviction": "priority"}, ValueError, "'priority': expected one of learned, l"),
    (HOST | {"host_eviction": "s3"}, ValueError, "is 's3': expected one of learned, lru$"),
    ({"host_eviction": "learned"}, ValueError, "is 'learned': expected only with a host tier"),
    (HOST | {"host_eviction": "learned"}, ValueError, "eviction is 'lru': expected 'learned' fo"),
    (LEARNED | {"host_eviction_options": {"x": 1}}, ValueError, "'learned': option 'x' is 1: ex"),
    ({"num_host_blocks": 1}, ValueError, "num_host_blocks is 1: expected 2 to"),
    (HOST | {"eviction": "learned", "min_gain_to_write": 0.5}, ValueError,
     "min_gain_to_write is 0.5.*, and host_eviction is 'lru': expected 'learned'"),
    ({"min_gain_to_write": 1.5}, ValueError, "min_gain_to_write is 1.5.*: expected 0 to 1 hits"),
    ({"min_gain_to_write": float("nan")}, ValueError, "min_gain_to_write is "),
])  # fmt: skip
def test_invalid_options_of_tiers_are_rejected(options, error, message):
    with pytest.raises(error, match=message):
        KVCacheManager(4, 10, 64, **options)


# Regressions ---------------------------------------------------------------------------------------


def test_row_that_grew_into_the_watermark_can_return():
    engine = Engine(num_blocks=11, num_host_blocks=60, watermark=0.2)
    engine.admit("a", range(30))
    engine.step([0], [6], token_ids=range(6), num_token_ids=[6])
    engine.step(swap_out=[0])
    assert engine.step([0], [1], token_ids=[1]).status.tolist() == [Status.SERVED]


def test_swap_outs_take_host_pages_before_write_through():
    engine = Engine(num_blocks=30, num_host_blocks=6, host_write="through")
    engine.admit("a", range(20))
    assert engine.step(swap_out=[0]).status.tolist() == [Status.SERVED]


def test_fences_during_a_swap_end_with_their_own_steps():
    manager = make(
        num_blocks=30, groups=[GroupSpec("sliding_window", 4, {"window": 5})], fence_frees=True
    )
    manager.step(new=[Request("a", range(16)), Request("b", range(100, 108))])
    # Two blocks are fenced until step 1 is reported, and three until step 0 is reported.
    manager.step([0], [1], swap_out=[1])
    assert manager.pool.num_fenced == 5
    manager.report(StepReport(0, completed=True))
    assert manager.pool.num_fenced == 2


def test_clock_cannot_go_back():
    manager = KVCacheManager(4, 9, 64, eviction="priority")
    manager.cache.set_now(100)
    with pytest.raises(ValueError, match="set to 99000 ms: expected 100000 or more"):
        manager.cache.set_now(99)


# Eviction and pins through the manager ---------------------------------------------------------------


def test_priorities_protect_a_range_of_tokens_until_they_expire():
    manager = KVCacheManager(4, 7, 64, num_preallocate_tokens=0, eviction="priority")
    manager.cache.set_now(0)
    kept = Request("kept", range(8))
    manager.step(new=[kept])
    manager.free(kept, retention=[(0, 8, 90, 10.0)])
    for i in range(3):
        request = Request(f"r{i}", range(100 * i + 100, 100 * i + 116))
        manager.step(new=[request])
        manager.free(request)
    probe = Request("probe", range(9))
    assert manager.cache.cached_tokens(probe).on_device == 8
    manager.cache.set_now(11)
    for i in range(3):
        request = Request(f"s{i}", range(100 * i + 500, 100 * i + 516))
        manager.step(new=[request])
        manager.free(request)
    assert manager.cache.cached_tokens(probe).on_device == 0


def test_pinned_blocks_are_evicted_only_if_nothing_else_is_left():
    manager = KVCacheManager(4, 9, 64, num_preallocate_tokens=0)
    request = Request("chat", range(8))
    manager.step(new=[request])
    manager.free(request)
    assert manager.cache.pin("session", request) == 2
    for i in range(4):
        other = Request(f"r{i}", range(100 * i + 100, 100 * i + 120))
        manager.step(new=[other])
        manager.free(other)
    probe = Request("probe", range(9))
    assert manager.cache.cached_tokens(probe).on_device == 8
    assert manager.cache.stats.num_pins_broken == 0
    large = Request("large", range(900, 932))  # needs all blocks of the pool
    assert manager.step(new=[large]).status.tolist() == [Status.SERVED]
    assert manager.cache.stats.num_pins_broken == 2
    assert manager.cache.unpin("session") == 2  # returns the number of broken pins
    assert manager.cache.unpin("nobody") == 0
    check_invariants(manager)


def test_each_session_pins_its_own_cached_blocks():
    manager = manager_of(FULL, num_blocks=9)
    chat = new(manager, "chat", 12)
    pages, pin = ids(manager, chat), manager.cache.pin
    manager.free(chat)
    assert (pin("one", chat), manager.pool.num_pinned) == (3, 3)
    assert (pin("one", Request("b", range(4))), manager.pool.num_pinned) == (1, 1)  # replaces them
    manager.cache.evict(pages[1:2])
    assert pin("two", chat) == 1  # not the block after the gap
    manager.cache.evict(pages[:1])
    again = new(manager, "again", 8)
    manager.free(again)
    assert pin("three", again) == 2
    assert [manager.cache.unpin(name) for name in ("one", "two")] == [1, 1]  # these were evicted
    assert manager.pool.num_pinned == 2 and manager.cache.unpin("three") == 0
    assert manager.pool.num_pinned == 0


def test_free_with_invalid_retention_frees_nothing():
    manager, request = KVCacheManager(4, 9, 64), Request("a", range(8))
    manager.step(new=[request])
    for retention, error, message in (
        ([(0, 4, 101, None)], ValueError, r"retention\[0\]: priority is 101: expected 0 to 100"),
        ([(4, 0, 1, None)], ValueError, r"retention\[0\]: stop is 0: expected 4 to"),
        ([(0, 4, 1, -1.0)], ValueError, r"retention\[0\]: seconds is -1.0: expected a finite"),
        (5, TypeError, "retention is 5: expected a list of tuples"),
        ([(0, 4)], TypeError, r"expected \(first token, stop, priority, seconds or None\)"),
    ):
        with pytest.raises(error, match=message):
            manager.free(request, retention=retention)
        assert manager.row(request) == 0


def test_loaded_blocks_become_hits_for_others_after_the_report():
    engine = Engine(num_blocks=9)
    manager = engine.manager
    engine.run("a", range(13))
    engine.run("b", range(100, 132))
    before = manager.step()
    plan = manager.step(new=[Request("a2", range(13))])
    num_loaded = len(plan.swap_in)
    assert num_loaded > 0
    manager.report(StepReport(before.step_id, completed=True))  # the step before the load
    assert manager.pool.num_loading == num_loaded
    held = manager.pool.num_total - manager.pool.num_free
    probe = Request("probe", range(13))
    before = manager.cache.cached_tokens(probe)
    manager.report(StepReport(plan.step_id, completed=True))
    after = manager.cache.cached_tokens(probe)
    assert manager.pool.num_loading == 0
    assert (before.with_host, after.with_host) == (12, 12)
    assert (before.num_host_blocks, after.num_host_blocks) == (num_loaded, 0)
    assert manager.pool.num_total - manager.pool.num_free == held
    check_invariants(manager)


def test_pin_ends_when_its_block_is_cached_again():
    manager = manager_of(FULL, num_blocks=2)  # both requests use the same block
    for name in ("one", "two"):
        request = new(manager, name, 4)
        manager.free(request)
        manager.cache.pin(name, request)
        if name == "one":
            manager.cache.evict([1])
    assert manager.cache.unpin("one") == 1  # it was evicted
    assert manager.pool.num_pinned == 1 and manager.cache.unpin("two") == 0
