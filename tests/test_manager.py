import pickle

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache import KVCacheManager, Request, Status
from tests.model import ModelManager


def make(num_blocks=11, block_size=4, **options):
    options = {"max_model_len": 64, "num_preallocate_tokens": 0, **options}
    return KVCacheManager(block_size, num_blocks, **options)


def state(manager):
    pool = manager.pool
    return pool.num_free, pool.num_cached, pool.num_evicted, manager.stats


def test_a_second_request_hits_the_full_blocks_of_the_first():
    manager = make()
    first = Request("a", range(10))
    manager.step(new=[first])
    plan = manager.step(new=[Request("b", range(10))])
    assert plan.num_computed_tokens.tolist() == [8]
    assert plan.append_ids[0].tolist() == [1, 2, 4]
    assert manager.stats.hit_tokens == 8 and manager.stats.query_tokens == 20


def test_the_last_token_always_runs():
    manager = make()
    manager.step(new=[Request("a", range(8))])
    ids, num_tokens = manager.get_computed_blocks(Request("b", range(8)))
    assert (ids.tolist(), num_tokens) == ([1], 4)
    ids, num_tokens = manager.get_computed_blocks(Request("c", range(9)))
    assert (ids.tolist(), num_tokens) == ([1, 2], 8)


def test_blocks_of_one_step_are_hits_for_later_plans_only():
    """Two equal requests in one step: both compute, so the same hash stands twice (D5)."""
    manager = make()
    a, b = Request("a", range(10)), Request("b", range(10))
    plan = manager.step(new=[a, b])
    assert plan.num_computed_tokens.tolist() == [0, 0]
    assert manager.pool.num_cached == 4
    assert manager.get_computed_blocks(Request("c", range(10)))[0].tolist() == [1, 2]
    manager.check_invariants()
    # Ids once handed out never change; the older copies go first, then the younger ones are found.
    assert manager.block_ids(b).tolist() == [4, 5, 6]
    manager.pool.evict([1, 2])
    assert manager.get_computed_blocks(Request("c", range(10)))[0].tolist() == [4, 5]
    manager.free(a)
    manager.free(b)
    manager.check_invariants()


def test_a_plan_names_rows_and_what_changed():
    manager = make()
    a, b = Request("a", range(6)), Request("b", range(100, 103))
    plan = manager.step(new=[a, b])
    assert plan.rows.tolist() == [0, 1] and plan.clear_rows.tolist() == [0, 1]
    assert plan.append_rows.tolist() == [0, 1] and plan.append_splits[0].tolist() == [0, 2, 3]
    plan = manager.step([0, 1], [1, 3])
    assert plan.num_computed_tokens.tolist() == [6, 3]
    assert plan.append_rows.tolist() == [1] and plan.append_ids[0].tolist() == [4]
    manager.free(a)
    plan = manager.step([1], [1], new=[Request("c", range(50, 55))])
    assert plan.rows.tolist() == [1, 0] and plan.clear_rows.tolist() == [0]


def test_a_plan_pickles():
    plan = make().step(new=[Request("a", range(6))])
    again = pickle.loads(pickle.dumps(plan))
    assert again.step_id == plan.step_id and again.version == plan.version
    assert again.append_ids[0].tolist() == plan.append_ids[0].tolist()


def test_what_does_not_fit_waits_and_what_never_will_is_told_apart():
    manager = make(num_blocks=6)
    manager.step(new=[Request("a", range(12))])
    before = state(manager)
    plan = manager.step(new=[Request("b", range(100, 112)), Request("c", range(24))])
    assert plan.status.tolist() == [Status.WAIT, Status.NEVER]
    assert plan.rows.tolist() == [-1, -1] and len(plan.append_ids[0]) == 0
    assert state(manager) == before
    plan = manager.step([0], [13])
    assert plan.status.tolist() == [Status.NEVER] and state(manager) == before
    plan = manager.step([0], [8])
    assert plan.status.tolist() == [Status.SERVED]


def test_a_request_that_does_not_fit_leaves_the_order_of_eviction():
    """The defect of an original: hits touched before the capacity check."""
    manager = make(num_blocks=4)
    a, b = Request("a", range(4)), Request("b", range(100, 104))
    manager.step(new=[a, b])
    manager.free(a)
    manager.free(b)
    # It would hit a's block, and needs three more: two are free, one of them the hit itself.
    assert manager.allocate_slots(Request("c", range(13)), 9, [1]) is None
    assert manager.step(new=[Request("c", range(13))]).status.tolist() == [Status.NEVER]
    manager.step(new=[Request("d", range(50, 54)), Request("e", range(60, 64))])
    assert len(manager.get_computed_blocks(Request("f", range(5)))[0]) == 0  # a went first
    assert len(manager.get_computed_blocks(Request("g", range(100, 105)))[0]) == 1


def test_computed_blocks_that_are_free_do_not_count_as_free():
    manager = make(num_blocks=5)
    a = Request("a", range(9))
    manager.step(new=[a, Request("x", [99])])
    manager.free(a)
    request = Request("b", [*range(8), *range(50, 58)])
    ids, num_tokens = manager.get_computed_blocks(request)
    assert num_tokens == 8
    assert manager.allocate_slots(request, 8, ids) is None
    assert manager.allocate_slots(request, 4, ids).tolist() == [3]


def test_allocate_and_append_slots_answer_new_blocks():
    manager = make()
    request = Request("a", range(6))
    assert manager.allocate_slots(request, 6).tolist() == [1, 2]
    assert manager.append_slots(request, 2).tolist() == []
    assert manager.append_slots(request, 1).tolist() == [3]
    assert manager.append_slots(request, 8 * 4) is None


def test_preallocation_takes_more_but_never_beyond_the_model_or_the_pool():
    manager = make(num_preallocate_tokens=8)
    a = Request("a", range(3))
    assert manager.allocate_slots(a, 3).tolist() == [1, 2, 3]
    assert manager.append_slots(a, 9).tolist() == []
    assert manager.append_slots(a, 1).tolist() == [4, 5, 6]
    b = Request("b", range(50, 60))
    assert manager.allocate_slots(b, 10).tolist() == [7, 8, 9, 10]  # one of two fitted
    manager = make(num_preallocate_tokens=100, max_model_len=9)
    assert manager.allocate_slots(Request("a", range(3)), 3).tolist() == [1, 2, 3]


def test_lookahead_slots_are_allocated_and_never_cached():
    manager = make()
    plan = manager.step(new=[Request("a", range(4))], num_lookahead_tokens=5)
    assert plan.append_ids[0].tolist() == [1, 2, 3]
    assert manager.pool.num_cached == 1


def test_late_tokens_are_hashed_when_they_arrive():
    manager = make()
    request = Request("a", range(6))
    manager.step(new=[request])
    manager.step([0], [2])  # two slots reserved, their tokens not known yet
    assert manager.pool.num_cached == 1
    request.append_tokens([6, 7])
    manager.step([0], [1])
    assert manager.pool.num_cached == 2
    assert manager.get_computed_blocks(Request("b", range(9)))[1] == 8


def test_chunked_prefill_caches_what_was_computed():
    manager = make()
    plan = manager.step(new=[Request("a", range(20))], new_num_tokens=[6])
    assert len(plan.append_ids[0]) == 2 and manager.pool.num_cached == 1
    manager.step([0], [14])
    assert manager.pool.num_cached == 5


def test_a_request_may_opt_out_of_reading_and_of_writing():
    manager = make()
    manager.step(new=[Request("a", range(10))])
    blind = Request("b", range(10), read_cache=False)
    assert manager.get_computed_blocks(blind)[1] == 0
    assert manager.step(new=[blind]).num_computed_tokens.tolist() == [0]
    assert manager.stats.num_requests == 1
    cached = manager.pool.num_cached
    manager.step(new=[Request("c", range(50, 60), write_cache=False)])
    assert manager.pool.num_cached == cached


def test_without_caching_nothing_is_hashed_or_hit():
    manager = make(enable_caching=False)
    manager.step(new=[Request("a", range(10))])
    assert manager.pool.num_cached == 0
    assert manager.get_computed_blocks(Request("b", range(10)))[1] == 0
    with pytest.raises(ValueError, match="caching is off"):
        manager.allocate_slots(Request("b", range(10)), 6, [1])


def test_free_is_a_no_op_for_what_is_not_admitted():
    manager = make()
    request = Request("a", range(10))
    manager.free(request)
    manager.step(new=[request])
    manager.free(request)
    manager.free(request)
    assert manager.pool.num_free == 10
    manager.check_invariants()


def test_hashes_survive_preemption():
    manager = make()
    request = Request("a", range(10))
    manager.step(new=[request])
    request.append_tokens([10, 11])
    manager.step([0], [2])
    manager.free(request)
    plan = manager.step(new=[request])
    assert plan.num_computed_tokens.tolist() == [8] and request.num_tokens == 12


def test_reset_waits_for_every_block():
    manager = make()
    request = Request("a", range(10))
    manager.step(new=[request])
    assert manager.reset_prefix_cache() is False and manager.pool.num_cached == 2
    manager.free(request)
    assert manager.reset_prefix_cache() is True
    assert manager.get_computed_blocks(request)[1] == 0


def test_rows_run_out_when_they_are_limited():
    manager = make(max_num_reqs=1)
    a, b = Request("a", range(3)), Request("b", range(5, 8))
    assert manager.step(new=[a, b]).status.tolist() == [Status.SERVED, Status.WAIT]
    assert manager.allocate_slots(b, 3) is None
    manager.free(a)
    assert manager.step(new=[b]).rows.tolist() == [0]


def test_a_request_moves_to_a_manager_of_another_block_size():
    request = Request("a", range(40))
    assert make(block_size=4).block_hashes(request).shape == (10, 32)
    other = make(block_size=8)
    assert other.block_hashes(request).shape == (5, 32)
    assert other.step(new=[request]).status.tolist() == [Status.SERVED]


def bad_calls():
    unknown = Request("zz", range(5))
    other = Request("yy", range(100, 105))
    yield lambda m, a: m.step([7], [1]), "row 7 is not in use"
    yield lambda m, a: m.step([-1], [1]), "row -1 is not in use"
    yield lambda m, a: m.step([0, 0], [1, 1]), "rows names row 0 twice"
    yield lambda m, a: m.step([0], [0]), "num_tokens is 0: expected 1 or more"
    yield lambda m, a: m.step([0], [-2]), "num_tokens is -2"
    yield lambda m, a: m.step([0], [1, 2]), "rows has 1 entries, num_tokens has 2"
    yield lambda m, a: m.step([0], [60]), "would have 70 tokens: expected at most max_model_len"
    yield lambda m, a: m.step(new=[unknown], new_num_tokens=[0]), "num_tokens is 0"
    yield lambda m, a: m.step(new=[unknown, unknown]), "new names a request twice"
    yield (
        lambda m, a: m.step(new=[unknown], new_num_tokens=[1, 2]),
        "new has 1 entries, new_num_t",
    )
    yield lambda m, a: m.step(new=[a]), "request 'a' is admitted already"
    yield lambda m, a: m.step(new=[Request("b", range(65))]), "a new request would have 65 tokens"
    yield lambda m, a: m.step([0], [1], num_lookahead_tokens=-1), "num_lookahead_tokens is -1"
    yield lambda m, a: m.append_slots(unknown, 1), "request 'zz' is not admitted"
    yield lambda m, a: m.append_slots(a, 0), "num_tokens is 0"
    yield lambda m, a: m.allocate_slots(unknown, 0), "num_tokens is 0"
    yield lambda m, a: m.allocate_slots(a, 3), "request 'a' is admitted already"
    yield lambda m, a: m.allocate_slots(unknown, 65), "would have 65 tokens"
    yield lambda m, a: m.allocate_slots(other, 1, [1]), r"computed_blocks\[0\] is block 1, which"
    yield lambda m, a: m.allocate_slots(unknown, 1, [99]), r"computed_blocks\[0\] is block 99"
    yield lambda m, a: m.allocate_slots(unknown, 1, [1, 2]), "computed_blocks has 2 blocks"
    yield lambda m, a: m.block_ids(unknown), "request 'zz' is not admitted"


@pytest.mark.parametrize(("call", "message"), list(bad_calls()))
def test_a_wrong_call_is_named_and_changes_nothing(call, message):
    manager = make()
    request = Request("a", range(10))
    manager.step(new=[request])
    before = state(manager), manager.block_ids(request).tolist()
    with pytest.raises(ValueError, match=message):
        call(manager, request)
    assert (state(manager), manager.block_ids(request).tolist()) == before
    manager.check_invariants()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0: expected 1 or more"),
        ({"num_blocks": 1}, "num_gpu_blocks .* is 1: expected 2 or more"),
        ({"num_blocks": -7}, "num_gpu_blocks .* is -7"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"num_preallocate_tokens": -1}, "num_preallocate_tokens is -1"),
        ({"max_num_reqs": 0}, "max_num_reqs is 0"),
        ({"sliding_window": 5}, "sliding_window is 5"),
    ],
)
def test_wrong_sizes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_request_needs_tokens():
    with pytest.raises(ValueError, match="token_ids of request 'a' is empty"):
        Request("a", [])
    with pytest.raises(ValueError, match="mm_items: 'i' starts at -1"):
        Request("a", [1], mm_items=[("i", -1, 3)])


class ManagerAgainstModel(RuleBasedStateMachine):
    """Random steps, frees and resets: the same answers as the model, and the invariants."""

    def __init__(self):
        super().__init__()
        self.manager = make(num_blocks=13, block_size=2, max_model_len=24, max_num_reqs=5)
        self.model = ModelManager(num_blocks=13, block_size=2, max_model_len=24, max_num_reqs=5)
        self.requests = {}
        self.count = 0

    @rule(
        prompts=st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 24)), max_size=3
        ),
        running=st.data(),
        lookahead=st.sampled_from([0, 0, 0, 3]),
    )
    def step(self, prompts, running, lookahead):
        rows = sorted(self.model.rows)
        rows = running.draw(st.lists(st.sampled_from(rows), unique=True) if rows else st.just([]))
        counts = []
        for row in rows:
            room = 24 - self.model.rows[row].num_computed
            counts.append(running.draw(st.integers(1, room)) if room else 0)
        rows = [row for row, count in zip(rows, counts) if count]
        counts = [count for count in counts if count]
        new, limits = [], []
        for variant, length, limit in prompts:
            tokens = [*range(length)] if variant == 0 else [variant, *range(length - 1)]
            new.append(Request(f"r{self.count}", tokens))
            limits.append(limit)
            self.count += 1
        plan = self.manager.step(
            rows, counts, new=new, new_num_tokens=limits, num_lookahead_tokens=lookahead
        )
        want = self.model.step(rows, counts, [list(r.token_ids) for r in new], limits, lookahead)
        assert plan.rows.tolist() == want.rows
        assert plan.status.tolist() == want.status
        assert plan.num_computed_tokens.tolist() == want.computed
        for request, row in zip(new, plan.rows[len(rows) :].tolist()):
            if row >= 0:
                self.requests[row] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), n=st.integers(1, 4))
    def tokens_arrive(self, data, n):
        row = data.draw(st.sampled_from(sorted(self.requests)))
        tokens = [90 + i for i in range(n)]
        self.requests[row].append_tokens(tokens)
        self.model.rows[row].tokens.extend(tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data):
        row = data.draw(st.sampled_from(sorted(self.requests)))
        self.manager.free(self.requests.pop(row))
        self.model.free(row)

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == self.model.reset()

    @invariant()
    def same_state(self):
        self.manager.check_invariants()
        assert self.manager.pool.num_free == self.model.num_free()
        assert self.manager.pool.num_cached == self.model.num_cached()
        for row, request in self.requests.items():
            assert self.manager.block_ids(request).tolist() == self.model.rows[row].blocks
            assert np.array_equal(request.token_ids, self.model.rows[row].tokens)


TestManagerAgainstModel = ManagerAgainstModel.TestCase
TestManagerAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
