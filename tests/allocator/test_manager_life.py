# SPDX-License-Identifier: Apache-2.0
"""Admission, reports, fences, withdrawal of blocks, statistics and events."""

import pytest

from kvcache import (
    Admit,
    GroupSpec,
    Request,
    Status,
    StepReport,
)
from kvcache.allocator import check_invariants
from tests.machinery.shared import manager_of
from tests.machinery.steps import ENCODER, FULL, STATE, WINDOW, go, hit, ids, new

LARGE = GroupSpec("full_attention", 8)


def make(num_blocks=11, **options):
    return manager_of(FULL, num_blocks=num_blocks, **options)


def done(manager, step, **options):
    return manager.report(StepReport(step, completed=True, **options))


# Admission ------------------------------------------------------------------------------------------


def test_only_running_requests_may_use_blocks_below_the_watermark():
    manager = make(watermark=0.2)  # the watermark keeps 2 of 10 blocks free
    assert manager.would_fit(Request("a", range(36))) == Status.NEVER
    a = new(manager, "a", 28)
    assert manager.would_fit(Request("b", range(50, 55))) == Status.WAIT
    assert manager.would_fit(Request("b", range(50, 54))) == Status.SERVED
    go(manager, a, 12)
    manager = make(watermark=0.4, num_preallocate_tokens=100)
    assert len(ids(manager, new(manager, "a", 4))) == 6  # so does preallocation


def test_new_requests_leave_reserved_blocks_free():
    manager, a = make(num_blocks=6), Request("a", range(9))
    assert manager.step(new=[Admit(a, num_reserved_blocks=3)]).status.tolist() == [Status.WAIT]
    assert manager.step(new=[Admit(a, num_reserved_blocks=2)]).status.tolist() == [Status.SERVED]
    go(manager, a, 8)


def test_lookahead_may_differ_by_row():
    manager = make(num_blocks=20)
    manager.step(new=[Request("a", [1]), Request("b", [2])])
    c = Admit(Request("c", [3]), num_lookahead_tokens=3)
    plan = manager.step([0, 1], [1, 1], new=[c], num_lookahead_tokens=[0, 7])
    assert plan.append_rows.tolist() == [1, 2]
    assert plan.append_splits[0].tolist() == [0, 2, 3]


def test_next_tokens_reuse_the_slots_of_rejected_drafts():
    manager = make()
    a = new(manager, "a", 4)
    assert go(manager, a, 6).append_ids[0].tolist() == [2, 3]  # one token and five drafts
    # Token 4 was known, two drafts were accepted, and a third token was sampled.
    late = {"token_ids": [4, 5, 6, 7], "num_token_ids": [4]}
    plan = go(manager, a, 1, num_rejected_tokens=[3], **late)
    assert plan.num_computed_tokens.tolist() == [7] and len(plan.append_ids[0]) == 0
    assert manager.pool.num_cached == 2
    manager.reject_tokens(a, 0)
    with pytest.raises(ValueError, match="is 1: expected at most 0, the number of uncached"):
        manager.reject_tokens(a, 1)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"token_ids": [1, 2]}, "token_ids has 2 entries: expected 1, one per row"),
    ({"token_ids": [1], "num_token_ids": [2]}, "expected 2, the sum of num_token_ids"),
    ({"token_ids": [1] * 58, "num_token_ids": [58]}, "a request would have 65 tokens"),
    ({"num_token_ids": [1, 1]}, "rows has 1 entries, but num_token_ids has 2"),
    ({"num_token_ids": [-1]}, "num_token_ids is -1"),
    ({"num_rejected_tokens": [4]}, "num_rejected_tokens of row 0 is 4: expected at most 0"),
    ({"num_rejected_tokens": [-1]}, "num_rejected_tokens is -1: expected 0"),
    ({"num_lookahead_tokens": [1, 2]}, "rows has 1 entries, but num_lookahead_tokens has 2"),
])  # fmt: skip
def test_invalid_step_arrays_are_reported_and_change_nothing(arguments, message):
    manager = make()
    a = new(manager, "a", 8)
    with pytest.raises(ValueError, match=message):
        manager.step([0], [1], **arguments)
    assert manager.num_computed_tokens(a) == 8 and a.num_tokens == 8
    check_invariants(manager)


# Reports --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("completed", [True, False])
def test_fenced_blocks_become_free_when_the_step_that_reads_them_is_reported(completed):
    manager, b = make(num_blocks=4, fence_frees=True), Request("b", range(50, 60))
    manager.free(new(manager, "a", 10))
    assert (manager.pool.num_free, manager.pool.num_fenced) == (0, 3)
    assert manager.step(new=[b]).status.tolist() == [Status.WAIT]
    assert manager.report(StepReport(0, completed=completed)) == {}
    assert (manager.pool.num_free, manager.pool.num_fenced) == (3, 0)
    assert manager.step(new=[b]).status.tolist() == [Status.SERVED]
    manager = make(fence_frees=True)
    a = new(manager, "a", 10)
    done(manager, 0)
    manager.free(a)
    assert manager.pool.num_free == 10  # without steps in flight, nothing is fenced


def test_blocks_are_free_after_all_steps_were_aborted_one_by_one():
    """Regression: the last step counted as issued although it was aborted, and kept its blocks."""
    manager = make(fence_frees=True)
    for i, name in enumerate("ab"):
        manager.free(new(manager, name, 8))
        manager.abort(i)
    assert manager.last_step_id == -1
    assert (manager.pool.num_fenced, manager.pool.num_free) == (0, manager.pool.num_total)


def test_report_of_an_unknown_step_is_rejected():
    manager = make()
    with pytest.raises(ValueError, match="step_id is 0: no step has been made"):
        done(manager, 0)
    for _ in range(70):
        manager.step()
    with pytest.raises(ValueError, match="step_id is 70: expected 0 to 69, the steps so far"):
        manager.abort(70)
    with pytest.raises(ValueError, match=r"step_id is 5: .* in flight, but it is too old"):
        manager.abort(5)
    done(manager, 67)
    with pytest.raises(ValueError, match=r"step_id is 67: .* but it was reported as done"):
        manager.report(StepReport(67, completed=False))


def test_each_of_several_aborted_steps_may_be_reported():
    """A worker reports every step. The report of the first failed step also withdraws all later steps."""
    manager = make()
    a = new(manager, "a", 20, 8)
    go(manager, a, 4, 4)
    assert manager.abort(1) == {"a": 8}
    third = go(manager, a, 4)
    assert manager.abort(2) == {}
    assert third.num_computed_tokens.tolist() == [8] and manager.num_computed_tokens(a) == 12


def test_report_is_accepted_entirely_or_not_at_all():
    manager = make(fence_frees=True)
    manager.free(new(manager, "a", 10))
    for completed in (True, False):
        with pytest.raises(ValueError, match="failed_pages holds block 11: expected 1 to 10"):
            manager.report(StepReport(0, completed, failed_pages=[1, 11]))
        assert manager.pool.num_fenced == 3 and manager.pool.num_cached == 2


def test_aborts_do_not_grow_the_journal():
    """The first step is never reported, and every later step is aborted."""
    manager = make()
    new(manager, "kept", [99])
    for i in range(100):
        manager.free(new(manager, str(i), 8))
        manager.abort(i + 1)
    with pytest.raises(ValueError, match=r"step_id is 0: .* too old"):
        manager.abort(0)
    manager.step()
    check_invariants(manager)


def test_abort_affects_only_rows_served_by_the_step():
    manager = make(num_blocks=40)
    a, _ = new(manager, "a", 22), new(manager, "b", 22)
    assert manager.abort(1) == {"b": 20}
    assert manager.num_computed_tokens(a) == 22
    go(manager, a, 1)
    manager.admit(Admit(Request("c", range(50, 70)), num_tokens=20), ())
    assert manager.abort(2) == {"a": 22}
    assert hit(manager, range(50, 70)) == 16


# Withdrawal -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "tokens", "chunks", "failed", "valid", "num_hit"),
    [
        pytest.param([FULL], 17, [17], (0, 2), 8, 8, id="later blocks"),
        pytest.param([FULL, LARGE], 17, [17], (1, 1), 8, 0, id="smaller blocks"),
        pytest.param([FULL, WINDOW], 9, [9], (1, 1), 4, 4, id="window"),
        # Token 8 would attend to tokens 3 and later. The row has dropped the first blocks of that
        # window, but they are still cached.
        pytest.param([FULL, WINDOW], 30, [12, 4, 4, 4], (0, 2), 8, 8, id="window from the cache"),
        pytest.param([FULL, STATE], 24, [8, 12], (1, 4), 0, 0, id="state"),
        # Found by a random run: the encoder's blocks were allocated twice.
        pytest.param([FULL, ENCODER], 9, [9], (1, 0), 0, 0, id="encoder"),
    ],
)
def test_failed_block_withdraws_everything_computed_from_it(
    groups, tokens, chunks, failed, valid, num_hit
):
    manager = manager_of(*groups, num_blocks=60)
    a = new(manager, "a", tokens, chunks[0], num_encoder_tokens=8 * (ENCODER in groups))
    other = new(manager, "other", range(100, 116))
    for count in chunks[1:]:
        go(manager, a, count)
    page, encoder = ids(manager, a, failed[0])[failed[1]], ids(manager, a, 1 % len(groups))
    assert manager.invalidate([page]) == {"a": valid}
    assert hit(manager, tokens) == num_hit
    assert hit(manager, range(100, 117)) == 16 and manager.num_computed_tokens(other) == 16
    check_invariants(manager)
    assert go(manager, a, 1).num_computed_tokens.tolist() == [valid]
    assert ENCODER not in groups or ids(manager, a, 1) == encoder


def test_siblings_of_a_failed_block_stay_cached():
    manager, trunk = make(num_blocks=30), list(range(8))
    a, _ = (new(manager, str(n), [*trunk, *range(n, n + 5)]) for n in (10, 20))
    assert manager.invalidate([ids(manager, a)[2]]) == {"10": 8}
    assert hit(manager, [*trunk, *range(20, 25)]) == 12


def test_new_epoch_hides_cached_blocks_and_running_requests_cache_nothing():
    manager = make(num_blocks=30)
    a, b = new(manager, "a", 9), new(manager, "b", range(50, 59))
    manager.free(a)
    manager.cache.start_epoch()
    assert manager.pool.num_cached == 0 and hit(manager, 9) == 0
    go(manager, b, 4, token_ids=[59, 60, 61, 62], num_token_ids=[4])
    manager.free(b)
    assert manager.pool.num_cached == 0
    # Found by a random run: rows that were not in use had been marked as stale, too.
    manager.step(new=[a])
    assert manager.pool.num_cached == 2
    check_invariants(manager)


def test_blocks_that_all_running_requests_share_are_counted():
    manager = make(num_blocks=30)
    a = new(manager, "a", 14)
    new(manager, "b", 14), new(manager, "c", [*range(6), *range(50, 60)])
    count = manager.cache.num_common_prefix_blocks
    assert (count(a, 3), count(a, 2)) == (1, 0)
    for call, message in (
        (lambda: count(a, 0), "num_running_requests is 0"),
        (lambda: count(a, 1, group=1), "group is 1: expected 0 to 0"),
        (lambda: count(Request("x", [1]), 1), "request 'x' is not admitted"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# Statistics and events ------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True], ids=["evict", "reset"])
def test_block_that_left_the_cache_before_its_failure_is_reported(reset):
    """Regression: blocks that were computed from the failed block stayed in the cache if the failed
    block was evicted after its request had been freed.
    """
    manager = manager_of(*[FULL, WINDOW][: 1 + reset], num_blocks=100, fence_frees=True)
    a = new(manager, "a", 18)
    failed = ids(manager, a, int(reset))[0]
    manager.free(a)
    if reset:
        assert manager.cache.reset(1)
    else:
        manager.cache.evict([failed])
    done(manager, 0, failed_pages=[failed])
    # Another request computes the first block again, so that a lookup passes it.
    b = new(manager, "b", 18 if reset else 5)
    done(manager, 1)
    found = manager.cache.find_prefix(Request("c", range(18)))
    num_blocks = 4 if reset else 1
    assert found.num_tokens == 4 * num_blocks and manager.num_computed_tokens(b) == b.num_tokens
    blocks = found.block_ids[0] if reset else found.block_ids
    assert blocks.tolist() == ids(manager, b)[:num_blocks]


def test_aborted_step_caches_nothing_and_its_rows_roll_back():
    manager = make()
    a, b = new(manager, "a", 20, 6), Request("b", range(20))
    go(manager, a, 10)
    later = manager.step([0], [1], new=[b])  # hits blocks that the aborted step computed
    assert later.num_computed_tokens.tolist() == [16, 16]
    assert manager.abort(1) == {"a": 6, "b": 4}
    assert hit(manager, 20) == 4
    check_invariants(manager)
    plan = manager.step([0, 1], [2, 2])
    assert plan.num_computed_tokens.tolist() == [6, 4]
    assert plan.clear_rows.tolist() == [0, 1]  # the plan contains the complete tables again
    tables = [[*ids(manager, each)] for each in (a, b)]
    order = plan.append_rows.tolist()
    assert plan.append_ids[0].tolist() == [*tables[order[0]], *tables[order[1]]]
