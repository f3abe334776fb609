# SPDX-License-Identifier: Apache-2.0
"""A device tier and a host tier: swapped rows, cached blocks on the host, pins, and eviction
policies selected by name.
"""

import numpy as np
import pytest

from kvcache import (
    Admit,
    GroupSpec,
    KVCacheManager,
    Request,
    StepReport,
    eviction_names,
)
from kvcache.allocator import RequestState, check_invariants
from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvcache.step import Status
from tests.machinery.shared import manager_of, sampled
from tests.machinery.steps import ENCODER, FULL, STATE, go, ids, new

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


def test_host_page_is_not_reused_while_it_is_read():
    manager = make(num_blocks=6, num_host_blocks=4)  # the host tier has 3 usable pages
    for name, start in (("a", 0), ("b", 100)):
        request = Request(name, range(start, start + 16))
        plan = manager.step(new=[request])
        manager.free(request)
    pages = plan.swap_out[:, 1].tolist()
    assert len(pages) == 3
    again = Request("a2", range(16))
    plan = manager.step(new=[again])
    read = plan.swap_in[:, 0].tolist()
    assert read
    assert not set(read) & set(plan.swap_out[:, 1].tolist())
    manager.free(again)
    for i in range(3):
        other = Request(f"c{i}", range(200 + 50 * i, 216 + 50 * i))
        later = manager.step(new=[other])
        assert not set(read) & set(later.swap_out[:, 1].tolist())
        manager.free(other)
    assert manager.cache.stats.host.unwritten_blocks > 0
    manager.report(StepReport(later.step_id, completed=True))
    check_invariants(manager)


def test_hit_prefers_device_blocks_individually():
    """Found by a random run: a block cached on both tiers was loaded from the host if the blocks
    before it were cached only on the host.
    """
    engine = Engine(num_blocks=8)
    engine.run("a", range(13))
    manager = engine.manager
    first = manager.cache.find_prefix(Request("probe", range(13))).block_ids
    engine.run("b", range(100, 128))
    manager.cache.evict(first)
    engine.run("c", [*range(12), 50])
    blocks = manager.cache.find_prefix(Request("probe", range(13))).block_ids
    if len(blocks) == 3:
        manager.cache.evict(blocks[:1])
    tokens = manager.cache.cached_tokens(Request("probe", range(13)))
    assert tokens.with_host == 12
    assert tokens.num_host_blocks == 1


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


def test_fenced_page_written_to_the_host_is_not_reallocated_before_the_report():
    """Found by a random run of the contents simulation."""
    manager = make(num_blocks=4, host_write="through", fence_frees=True)
    request = Request("a", range(8))
    manager.step(new=[request])
    manager.free(request)
    plan = manager.step()
    manager.report(StepReport(0, completed=True))
    assert plan.swap_out[:, 0].tolist() == [2, 1]
    waits = manager.step(new=[Request("b", range(100, 112))])
    assert waits.status.tolist() == [Status.WAIT]
    manager.report(StepReport(plan.step_id, completed=True))
    assert manager.step(new=[Request("c", range(200, 212))]).status.tolist() == [Status.SERVED]


@pytest.mark.parametrize("completed", [False, True])
def test_page_that_was_not_written_is_not_found(completed):
    engine = Engine()
    engine.run("a", range(16))
    plan = engine.manager.step(new=[Request("b", range(100, 116))])
    pages = plan.swap_out[:, 1].tolist()
    assert engine.manager.host_pool.num_cached == len(pages) > 0
    report = StepReport(plan.step_id, completed, failed_host_pages=pages if completed else [])
    assert engine.manager.report(report) == ({} if completed else {"b": 0})
    assert engine.manager.host_pool.num_cached == 0
    check_invariants(engine.manager)


def test_aborted_load_is_not_found_and_its_row_returns_to_an_earlier_token():
    manager = with_offloaded().manager
    on_device = manager.cache.cached_tokens(Request("probe", range(16))).on_device
    plan = manager.step(new=[Request("a2", range(16))])
    assert len(plan.swap_in) > 0
    goes_on_at = manager.abort(plan.step_id)["a2"]
    assert goes_on_at <= plan.num_computed_tokens[0] - 4 * len(plan.swap_in)
    assert manager.pool.num_loading == 0
    assert manager.cache.cached_tokens(Request("probe", range(16))).on_device <= on_device
    check_invariants(manager)


def test_failed_load_is_not_found_on_either_tier():
    manager = with_offloaded().manager
    again = Request("a2", range(16))
    plan = manager.step(new=[again])
    block = int(plan.swap_in[0, 1])
    column = ids(manager, again).index(block)
    report = StepReport(plan.step_id, completed=True, failed_pages=[block])
    assert manager.report(report) == {"a2": column * 4}
    assert manager.cache.cached_tokens(Request("probe", range(16))).with_host <= column * 4
    check_invariants(manager)


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


def test_states_are_loaded_into_the_page_that_continues_them():
    groups = [FULL, STATE]
    engine = Engine(num_blocks=9, groups=groups)
    manager = engine.manager
    for name, start in (("a", 0), ("b", 100), ("c", 200)):
        request, _ = engine.admit(name, range(start, start + 9), num_tokens=8)
        engine.step([manager.row(request)], [1])
        manager.free(request)
    request, plan = engine.admit("a2", range(9))
    assert plan.num_computed_tokens.tolist() == [8]
    state = manager.block_ids(request, 1).tolist()
    assert state[:2] == [0, 0]
    assert len(plan.copy) == len(plan.zero) == 0
    assert state[2] in plan.swap_in[:, 1].tolist()


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


def test_blocks_of_a_swapped_out_row_are_available_in_the_same_step():
    engine = Engine(num_blocks=5)
    request, _ = engine.admit("a", range(12))
    other = Request("b", range(100, 116))
    plan = engine.step(swap_out=[0], new=[other])
    assert plan.rows.tolist() == [0, 1]  # rows to swap out come first, then new requests
    assert plan.status.tolist() == [Status.SERVED, Status.SERVED]
    assert set(plan.swap_out[:, 0]) <= set(plan.append_ids[0])
    assert engine.step([0], [1]).status.tolist() == [Status.WAIT]
    assert engine.manager.state(request) is RequestState.SWAPPED_OUT
    engine.manager.free(other)
    # The pool has fewer than 5 blocks.
    assert engine.step([0], [5]).status.tolist() == [Status.NEVER]
    assert engine.step([0], [4]).status.tolist() == [Status.SERVED]


def test_full_host_prevents_swap_out():
    engine = Engine(num_blocks=9, num_host_blocks=3)
    request, _ = engine.admit("a", range(12))
    plan = engine.step(swap_out=[0])
    assert plan.status.tolist() == [Status.WAIT]
    assert engine.manager.state(request) is not RequestState.SWAPPED_OUT
    assert len(plan.swap_out) == 0


def test_shared_blocks_are_swapped_once():
    engine = Engine(num_blocks=12)
    manager = engine.manager
    parent, _ = engine.admit("parent", range(10))
    child = Request("child", [*range(10), 7])
    manager.fork(parent, child)
    plan = engine.step(swap_out=[0, 1])
    assert len(plan.swap_out) == 3
    plan = engine.step([0, 1], [1, 1])
    # Full blocks are shared again. The partial block is loaded once per row, because both rows
    # write to it.
    assert len(plan.swap_in) == 4
    assert manager.block_ids(parent).tolist()[:2] == manager.block_ids(child).tolist()[:2]
    assert manager.block_ids(parent)[2] != manager.block_ids(child)[2]
    assert len(plan.copy) == 0


def test_only_blocks_that_a_row_reads_are_swapped():
    window = GroupSpec("sliding_window", 4, {"window": 5})
    for groups, request, num_out, num_in, held in (
        ([window], Admit(Request("a", range(16))), 4, 1, 2),
        ([FULL], Admit(Request("a", range(4)), num_lookahead_tokens=8), 1, 1, 2),
        ([FULL, ENCODER], Admit(Request("a", range(5), num_encoder_tokens=7)), 4, 4, 4),
    ):
        engine = Engine(num_blocks=12, groups=groups)
        engine.step(new=[request])
        assert len(engine.step(swap_out=[0]).swap_out) == num_out
        assert len(engine.step([0], [1]).swap_in) == num_in
        tables = [ids(engine.manager, request.request, g) for g in range(len(groups))]
        assert sum(page > 0 for table in tables for page in table) == held


def test_blocks_of_a_swapped_out_row_can_still_be_hit():
    engine = Engine(num_blocks=5)
    engine.admit("a", range(16))
    engine.step(swap_out=[0], new=[Request("b", range(100, 116))])
    assert engine.manager.cache.cached_tokens(Request("probe", range(17))).with_host == 16


@pytest.mark.parametrize("which", ["out", "in"])
def test_row_loses_its_kv_if_its_swap_is_aborted(which):
    manager = make(num_blocks=9, enable_caching=False)
    request = Request("a", range(10))
    manager.step(new=[request])
    plan = manager.step(swap_out=[0])
    if which == "in":
        plan = manager.step([0], [1])
    assert manager.abort(plan.step_id) == {"a": 0}
    assert manager.state(request) is not RequestState.SWAPPED_OUT
    check_invariants(manager)
    assert manager.host_pool.num_free == manager.host_pool.num_total
    assert manager.step([0], [10]).status.tolist() == [Status.SERVED]


def test_blocks_computed_from_an_invalid_page_are_found_after_swaps():
    """Found by random runs: the row was on the host, or its blocks had no hash when they were
    released.
    """
    manager = make(num_blocks=9, enable_caching=False)
    block = ids(manager, new(manager, "a", 10))[1]
    manager.step(swap_out=[0])
    assert manager.invalidate([block]) == {"a": 0}
    check_invariants(manager)
    manager = make(num_blocks=9)
    a = new(manager, "a", 7)
    plan = manager.step(swap_out=[0])
    go(manager, a, 1, token_ids=[7])  # the step fills the block that was swapped in
    manager.free(a)
    probe = Request("probe", range(9))
    assert manager.cache.cached_tokens(probe).on_device == 8
    manager.report(StepReport(plan.step_id, True, failed_host_pages=[plan.swap_out[1, 1]]))
    assert manager.cache.cached_tokens(probe).on_device == 4
    check_invariants(manager)


def test_blocks_without_hashes_of_a_freed_row_are_found_by_a_later_invalidation():
    """Found by a random run of the contents simulation: the row's blocks were no longer recorded
    anywhere.
    """
    manager = make(num_blocks=12)
    request = Request("a", range(8))
    manager.step(new=[request])
    block = int(manager.block_ids(request)[0])
    manager.cache.evict([block])
    manager.step([0], [4], token_ids=list(range(8, 12)), num_token_ids=[4])
    manager.free(request)
    assert manager.pool.num_cached == 2
    manager.invalidate([block])
    assert manager.pool.num_cached == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.step(swap_out=[7]), "row 7 is not in use"),
        (lambda m: m.step([0], [1], swap_out=[0]), "swap_out contains row 0, which rows"),
        (lambda m: m.step(swap_out=[0, 0]), "swap_out contains row 0, which"),
        (lambda m: m.step(swap_out=[1]), "row 1 is swapped out"),
        (lambda m: m.block_ids(m.away), "row 1 is swapped out"),
        (lambda m: m.fork(m.away, Request("c", range(50, 59))), "row 1 is swapped out"),
        (lambda m: m.step(new=[Admit(NEW, max_host_blocks=-1)]), "max_host_blocks is -1"),
        (lambda m: m.admit(Admit(NEW, max_host_blocks=1)), "is 1: expected None, because admit"),
        (lambda m: m.report(StepReport(0, True, failed_host_pages=[0])), "failed_host_pages holds"),
    ],
)
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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"host_write": "x"}, ValueError, "host_write is 'x': expected 'back' or 'through'"),
        ({"eviction": None}, TypeError, "eviction is None: expected the name of a policy"),
        ({"eviction": "oldest"}, ValueError, "eviction is 'oldest': expected one of last_access"),
        ({"eviction_options": [1]}, TypeError, "eviction_options is .1.: expected a dict"),
        ({"eviction_options": {"x": 1}}, ValueError, "option 'x' is 1: expected no options"),
        (
            HOST | {"host_eviction": "priority"},
            ValueError,
            "'priority': expected one of learned, l",
        ),
        (HOST | {"host_eviction": "s3"}, ValueError, "is 's3': expected one of learned, lru$"),
        ({"host_eviction": "s3"}, ValueError, "is 's3': expected one of learned, lru"),
        ({"host_eviction": "learned"}, ValueError, "is 'learned': expected only with a host tier"),
        (
            HOST | {"host_eviction": "learned"},
            ValueError,
            "eviction is 'lru': expected 'learned' fo",
        ),
        (
            {"host_eviction_options": {"x": 2}},
            ValueError,
            "host_eviction 'lru': option 'x' is 2: ex",
        ),
        (
            LEARNED | {"host_eviction_options": {"x": 1}},
            ValueError,
            "'learned': option 'x' is 1: ex",
        ),
        ({"num_host_blocks": 1}, ValueError, "num_host_blocks is 1: expected 2 to"),
        ({"num_host_blocks": 2.5}, TypeError, "num_host_blocks is 2.5: expected an integer"),
        (
            HOST | {"eviction": "learned", "min_gain_to_write": 0.5},
            ValueError,
            "min_gain_to_write is 0.5.*, and host_eviction is 'lru': expected 'learned'",
        ),
        (
            {"min_gain_to_write": 1.5},
            ValueError,
            "min_gain_to_write is 1.5.*: expected 0 to 1 hits",
        ),
        ({"min_gain_to_write": float("nan")}, ValueError, "min_gain_to_write is "),
        ({"min_gain_to_write": "x"}, TypeError, "min_gain_to_write is 'x': expected a number"),
    ],
)
def test_invalid_options_of_tiers_are_rejected(options, error, message):
    with pytest.raises(error, match=message):
        KVCacheManager(4, 10, 64, **options)


# Regressions ---------------------------------------------------------------------------------------


def test_plans_do_not_contain_rows_on_the_host():
    engine = Engine(num_blocks=6, num_host_blocks=40)
    for i in range(3):
        _, plan = engine.admit(f"x{i}", range(100 * i + 100, 100 * i + 108))
        engine.step(swap_out=[int(plan.rows[0])])
    parent, _ = engine.admit("a", range(8))
    child = Request("c", [*range(8), 50])
    row = engine.manager.fork(parent, child)
    plan = engine.step(swap_out=[row])
    assert plan.clear_rows.tolist() == [row]
    assert len(plan.append_rows) == 0
    manager = make(num_blocks=12, groups=[FULL, ENCODER])
    manager.step(new=[Request("e", range(5), num_encoder_tokens=7)])
    plan = manager.step(swap_out=[0])
    manager.abort(plan.step_id)
    assert len(manager.step().append_rows) == 0
    assert manager.step([0], [5]).append_rows.tolist() == [0]


def test_reused_journal_entry_contains_nothing_of_the_earlier_step():
    manager = make(num_blocks=30, num_host_blocks=40)
    one, two = Request("a", range(8)), Request("b", range(100, 108))
    manager.step(new=[one, two])
    manager.step(swap_out=[0])
    manager.step([0], [1], token_ids=[1])
    for _ in range(66):
        plan = manager.step([1], [1], token_ids=[1], num_rejected_tokens=[0])
        if plan.step_id == 50:
            break
    for _ in range(20):
        plan = manager.step()
    assert manager.abort(plan.step_id) == {}


def test_row_that_grew_into_the_watermark_can_return():
    engine = Engine(num_blocks=11, num_host_blocks=60, watermark=0.2)
    engine.admit("a", range(30))
    engine.step([0], [6], token_ids=range(6), num_token_ids=[6])
    engine.step(swap_out=[0])
    assert engine.step([0], [1], token_ids=[1]).status.tolist() == [Status.SERVED]


def test_no_block_is_written_to_the_host_twice():
    engine = Engine(num_blocks=11, num_host_blocks=60)
    engine.admit("a", range(20))
    engine.admit("b", range(100, 120))
    ids = list(range(200, 220))
    plan = engine.step([1], [20], token_ids=ids, num_token_ids=[20], swap_out=[0])
    assert len(plan.swap_out) == 5  # the step also reallocates the swapped-out row's blocks
    through = Engine(num_blocks=11, num_host_blocks=60, host_write="through")
    through.admit("a", range(16))
    assert len(through.step().swap_out) == 4
    # The blocks were already written to the host.
    assert len(through.step(swap_out=[0]).swap_out) == 0
    assert len(through.step([0], [1]).swap_in) == 4


def test_swap_outs_take_host_pages_before_write_through():
    engine = Engine(num_blocks=30, num_host_blocks=6, host_write="through")
    engine.admit("a", range(20))
    assert engine.step(swap_out=[0]).status.tolist() == [Status.SERVED]


def test_tokens_can_be_rejected_after_a_fork_with_an_encoder():
    manager = make(num_blocks=40, groups=[FULL, ENCODER])
    parent = Request("p", range(8), num_encoder_tokens=4)
    manager.step(new=[parent])
    child = Request("c1", range(9), num_encoder_tokens=4)
    manager.fork(parent, child)
    manager.abort(0)
    row = manager.fork(child, Request("c2", [0], num_encoder_tokens=4))
    manager.step([row], [3])
    assert manager.step([row], [1], num_rejected_tokens=[2]).status.tolist() == [Status.SERVED]


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


def test_host_tier_evicts_tails_before_heads():
    engine = Engine(num_blocks=30, num_host_blocks=11, host_write="through")
    engine.run("a", range(40))
    engine.step()
    engine.run("b", range(100, 105))
    engine.step()
    assert engine.manager.host_pool.num_free == 10
    engine.manager.cache.evict(np.arange(1, 30))
    assert engine.manager.cache.cached_tokens(Request("probe", range(41))).with_host == 36


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
