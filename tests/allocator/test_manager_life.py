# SPDX-License-Identifier: Apache-2.0
"""Admission, reports, fences, withdrawal of blocks, statistics and events. Each test covers one
behavior.
"""

import pytest

from kvcache import (
    Admit,
    External,
    GroupSpec,
    KVCacheManager,
    Request,
    Status,
    StepReport,
    hash_blocks,
)
from kvcache.allocator import check_invariants
from kvcache.allocator.hashing import DEFAULT_SEED, hash_seed
from kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.machinery.shared import manager_of

WINDOW = GroupSpec("sliding_window", 4, {"window": 6})


def make(num_blocks=11, block_size=4, **options):
    options = {"max_model_len": 64, "num_preallocate_tokens": 0, **options}
    return KVCacheManager(block_size, num_blocks, **options)


def hit_length(manager, tokens):
    return manager.cache.find_prefix(Request("probe", tokens)).num_tokens


# Admission ------------------------------------------------------------------------------------------


def test_only_running_requests_may_use_blocks_below_the_watermark():
    manager = make(num_blocks=11, watermark=0.2)  # the watermark keeps 2 blocks free
    assert manager.would_fit(Request("a", range(36))) == Status.NEVER
    assert manager.step(new=[Request("a", range(28))]).status.tolist() == [Status.SERVED]
    assert manager.would_fit(Request("b", range(50, 55))) == Status.WAIT
    assert manager.would_fit(Request("b", range(50, 54))) == Status.SERVED
    assert manager.step([0], [12]).status.tolist() == [Status.SERVED]


def test_status_distinguishes_a_request_that_fits_only_in_chunks():
    manager = KVCacheManager(16, 20, 4096, sliding_window=32, num_preallocate_tokens=0)
    long = Request("a", range(2000))
    assert manager.would_fit(long) == Status.NEVER
    assert manager.would_fit(Admit(long, num_tokens=128)) == Status.SERVED
    assert manager.step(new=[Admit(long, num_tokens=128)]).status.tolist() == [Status.SERVED]


def test_hit_inside_a_block_is_dropped_if_its_copy_does_not_fit():
    groups = [GroupSpec("full_attention", 8)]
    options = {"hash_block_size": 2, "num_preallocate_tokens": 0}
    manager = KVCacheManager.for_groups(groups, 4, 64, **options)
    a, b = Request("a", range(24)), Request("b", [*range(6), *range(50, 68)])
    manager.step(new=[a])
    manager.free(a)
    # The request needs three blocks and the copy source a fourth, but the pool has only three.
    plan = manager.step(new=[b])
    assert plan.status.tolist() == [Status.SERVED] and plan.num_computed_tokens.tolist() == [0]


def test_preallocation_keeps_the_watermark_free():
    manager = make(num_blocks=11, watermark=0.4, num_preallocate_tokens=100)
    assert len(manager.step(new=[Request("a", range(4))]).append_ids[0]) == 6


def test_new_requests_leave_reserved_blocks_free():
    manager = make(num_blocks=6)
    a = Request("a", range(9))
    assert manager.step(new=[Admit(a, num_reserved_blocks=3)]).status.tolist() == [Status.WAIT]
    assert manager.step(new=[Admit(a, num_reserved_blocks=2)]).status.tolist() == [Status.SERVED]
    assert manager.step([0], [8]).status.tolist() == [Status.SERVED]


def test_lookahead_may_differ_by_row():
    manager = make(num_blocks=20)
    manager.step(new=[Request("a", [1]), Request("b", [2])])
    plan = manager.step(
        [0, 1],
        [1, 1],
        new=[Admit(Request("c", [3]), num_lookahead_tokens=3)],
        num_lookahead_tokens=[0, 7],
    )
    assert plan.append_rows.tolist() == [1, 2]
    assert plan.append_splits[0].tolist() == [0, 2, 3]


def test_next_tokens_reuse_the_slots_of_rejected_drafts():
    manager = make()
    request = Request("a", range(4))
    manager.step(new=[request])
    plan = manager.step([0], [6])  # one token and five drafts: slots 4 to 9
    assert plan.append_ids[0].tolist() == [2, 3]
    # Token 4 was known, two drafts were accepted, and a third token was sampled. Three drafts were
    # rejected.
    plan = manager.step(
        [0], [1], token_ids=[4, 5, 6, 7], num_token_ids=[4], num_rejected_tokens=[3]
    )
    assert plan.num_computed_tokens.tolist() == [7] and len(plan.append_ids[0]) == 0
    assert manager.pool.num_cached == 2
    manager.reject_tokens(request, 0)
    with pytest.raises(ValueError, match="is 1: expected at most 0, the number of uncached"):
        manager.reject_tokens(request, 1)


def test_rejected_draft_is_not_cached_as_the_token_that_replaces_it():
    manager = make()
    request = Request("a", range(4))
    manager.step(new=[request])
    manager.step([0], [4])  # slots 4 to 7; 6 and 7 hold drafts
    # Both drafts were rejected, so tokens 6 and 7 have no KV yet.
    request.append_tokens([4, 5, 6, 7])
    manager.reject_tokens(request, 2)
    manager.free(request)
    assert manager.pool.num_cached == 1


def test_token_ids_of_a_waiting_row_are_not_appended():
    manager = make(num_blocks=4)
    a, b = Request("a", range(4)), Request("b", range(50, 58))
    manager.step(new=[a, b])
    plan = manager.step([0, 1], [1, 1], token_ids=[4, 58])
    assert plan.status.tolist() == [Status.WAIT, Status.WAIT]
    assert (a.num_tokens, b.num_tokens) == (4, 8)
    manager.free(b)
    assert manager.step([0], [1], token_ids=[4]).status.tolist() == [Status.SERVED]
    assert a.token_ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_ids": [1, 2]}, "token_ids has 2 entries: expected 1, one per row"),
        ({"token_ids": [1], "num_token_ids": [2]}, "expected 2, the sum of num_token_ids"),
        ({"token_ids": [-3]}, r"token_ids\[0\] is -3: expected 0"),
        ({"token_ids": [1] * 58, "num_token_ids": [58]}, "a request would have 65 tokens"),
        ({"num_token_ids": [1, 1]}, "rows has 1 entries, but num_token_ids has 2"),
        ({"num_token_ids": [-1]}, "num_token_ids is -1"),
        ({"num_rejected_tokens": [4]}, "num_rejected_tokens of row 0 is 4: expected at most 0"),
        ({"num_rejected_tokens": [-1]}, "num_rejected_tokens is -1: expected 0"),
        ({"num_rejected_tokens": []}, "rows has 1 entries, but num_rejected_tokens has 0"),
        ({"num_lookahead_tokens": [1, 2]}, "rows has 1 entries, but num_lookahead_tokens has 2"),
        ({"num_lookahead_tokens": [-1]}, "num_lookahead_tokens is -1"),
    ],
)
def test_invalid_step_arrays_are_reported_and_change_nothing(arguments, message):
    manager = make()
    request = Request("a", range(8))
    manager.step(new=[request])
    with pytest.raises(ValueError, match=message):
        manager.step([0], [1], **arguments)
    assert manager.num_computed_tokens(request) == 8 and request.num_tokens == 8
    check_invariants(manager)


# Reports --------------------------------------------------------------------------------------------


def test_fenced_blocks_become_free_when_the_step_that_reads_them_is_reported():
    manager = make(num_blocks=4, fence_frees=True)
    a, b = Request("a", range(10)), Request("b", range(50, 60))
    first = manager.step(new=[a])
    manager.free(a)
    assert (manager.pool.num_free, manager.pool.num_fenced) == (0, 3)
    second = manager.step(new=[b])
    assert second.status.tolist() == [Status.WAIT]
    assert manager.report(StepReport(first.step_id, completed=True)) == {}
    assert (manager.pool.num_free, manager.pool.num_fenced) == (3, 0)
    assert manager.step(new=[b]).status.tolist() == [Status.SERVED]
    check_invariants(manager)


def test_fenced_blocks_may_be_hit():
    manager = make(num_blocks=5, fence_frees=True)
    a = Request("a", range(10))
    manager.step(new=[a])
    manager.free(a)
    plan = manager.step(new=[Request("b", range(10))])
    assert plan.num_computed_tokens.tolist() == [8]
    assert manager.cache.reset() is False
    manager.report(StepReport(1, completed=True))
    check_invariants(manager)


def test_without_steps_in_flight_nothing_is_fenced():
    manager = make(fence_frees=True)
    a = Request("a", range(10))
    manager.report(StepReport(manager.step(new=[a]).step_id, completed=True))
    manager.free(a)
    assert manager.pool.num_free == 10


def test_report_of_an_unknown_step_is_rejected():
    manager = make()
    with pytest.raises(ValueError, match="step_id is 0: no step has been made"):
        manager.report(StepReport(0, completed=True))
    for _ in range(70):
        manager.step()
    with pytest.raises(ValueError, match="step_id is 70: expected 0 to 69, the steps so far"):
        manager.abort(70)
    with pytest.raises(ValueError, match=r"step_id is 5: .* in flight, but it is too old"):
        manager.abort(5)
    manager.report(StepReport(67, completed=True))
    with pytest.raises(ValueError, match=r"step_id is 67: .* but it was reported as done"):
        manager.report(StepReport(67, completed=False))


def test_each_of_several_aborted_steps_may_be_reported():
    """A worker reports every step. The report of the first failed step also withdraws all later steps."""
    manager = make()
    a = Request("a", range(20))
    manager.step(new=[Admit(a, num_tokens=8)])
    first, second = manager.step([0], [4]), manager.step([0], [4])
    assert manager.report(StepReport(first.step_id, completed=False)) == {"a": 8}
    third = manager.step([0], [4])
    assert manager.report(StepReport(second.step_id, completed=False)) == {}
    assert third.num_computed_tokens.tolist() == [8]
    assert manager.num_computed_tokens(a) == 12


def test_report_is_accepted_entirely_or_not_at_all():
    manager = make(fence_frees=True)
    a = Request("a", range(10))
    plan = manager.step(new=[a])
    manager.free(a)
    for completed in (True, False):
        with pytest.raises(ValueError, match="11: expected 1 to 10"):
            manager.report(StepReport(plan.step_id, completed, failed_pages=[1, 11]))
        assert manager.pool.num_fenced == 3 and manager.pool.num_cached == 2


def test_report_includes_rows_that_released_a_failed_page_in_that_step():
    groups = [GroupSpec("full_attention", 4), GroupSpec("recurrent", 4)]
    manager = KVCacheManager.for_groups(groups, 50, 64, num_preallocate_tokens=0, fence_frees=True)
    manager.step(new=[Admit(Request("a", range(13)), num_tokens=3)])
    manager.report(StepReport(0, completed=True))
    state = int(manager.step([0], [5]).copy[0, 0])  # the page from which the state is moved
    assert manager.report(StepReport(1, True, [state])) == {"a": 0}
    assert hit_length(manager, range(13)) == 0


def test_aborts_do_not_grow_the_journal():
    """The first step is never reported, and every later step is aborted."""
    manager = make()
    kept = Request("kept", [99])
    manager.step(new=[kept])
    for i in range(100):
        request = Request(str(i), range(8))
        plan = manager.step(new=[request])
        manager.free(request)
        manager.abort(plan.step_id)
    with pytest.raises(ValueError, match=r"step_id is 0: .* too old"):
        manager.abort(0)
    manager.step()
    check_invariants(manager)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.report(None), "report is None: expected a StepReport"),
        (lambda m: m.report(StepReport(0, None)), r"report.completed is None: expected True"),
        (lambda m: m.free(None), "request is None: expected a Request"),
        (lambda m: m.row("r"), "request is 'r': expected a Request"),
    ],
)
def test_error_names_an_argument_that_is_not_a_report_or_request(call, message):
    manager = make()
    manager.step(new=[Request("a", [1])])
    with pytest.raises(TypeError, match=message):
        call(manager)
    with pytest.raises(ValueError, match="failed_pages holds block 20: expected 1 to 10"):
        manager.report(StepReport(0, True, [20]))
    with pytest.raises(ValueError, match="seconds is inf"):
        manager.cache.set_now(float("inf"))


def test_aborted_step_caches_nothing_and_its_rows_roll_back():
    manager = make()
    a, b = Request("a", range(20)), Request("b", range(20))
    manager.step(new=[Admit(a, num_tokens=6)])
    aborted = manager.step([0], [10])
    later = manager.step([0], [1], new=[b])  # hits blocks that the aborted step computed
    assert later.num_computed_tokens.tolist() == [16, 16]
    assert manager.abort(aborted.step_id) == {"a": 6, "b": 4}
    assert hit_length(manager, range(20)) == 4
    check_invariants(manager)
    plan = manager.step([0, 1], [2, 2])
    assert plan.num_computed_tokens.tolist() == [6, 4]
    assert plan.clear_rows.tolist() == [0, 1]  # the plan contains the complete tables again
    ids = plan.append_ids[0].tolist()
    splits = plan.append_splits[0].tolist()
    for row, request in ((0, a), (1, b)):
        at = plan.append_rows.tolist().index(row)
        assert ids[splits[at] : splits[at + 1]] == manager.block_ids(request).tolist()


def test_rows_cleared_by_an_aborted_plan_are_cleared_by_the_next():
    manager = make()
    a = Request("a", range(4))
    manager.step(new=[a])
    manager.free(a)
    plan = manager.step()
    assert plan.clear_rows.tolist() == [0]
    manager.abort(plan.step_id)
    assert manager.step().clear_rows.tolist() == [0]


def test_fences_of_aborted_steps_end_immediately():
    manager = make(num_blocks=4, fence_frees=True)
    a = Request("a", range(10))
    plan = manager.step(new=[a])
    manager.free(a)
    manager.report(StepReport(plan.step_id, completed=False))
    assert manager.pool.num_free == 3


# Withdrawal -----------------------------------------------------------------------------------------


def test_failed_blocks_and_all_blocks_computed_from_them_are_evicted():
    manager = make(num_blocks=30)
    a, b, c = Request("a", range(17)), Request("b", range(17)), Request("c", range(9))
    other = Request("d", range(50, 60))
    manager.step(new=[a, other])
    manager.step(new=[b, c])
    bad = manager.block_ids(a)[2]
    # Request c holds only the two blocks before the failed one.
    assert manager.invalidate([bad]) == {"a": 8, "b": 8}
    assert hit_length(manager, range(17)) == 8
    assert hit_length(manager, range(50, 60)) == 8
    check_invariants(manager)
    plan = manager.step([manager.row(a)], [9])
    assert plan.num_computed_tokens.tolist() == [8]
    assert bad not in manager.block_ids(a).tolist()[:2]


def test_descendants_leave_the_cache_even_if_a_block_between_was_evicted():
    """Found by a random run: the hash chain back to the invalid block had a gap."""
    manager = make(num_blocks=30)
    request = Request("a", range(17))
    manager.step(new=[request])
    ids = manager.block_ids(request)
    manager.free(request)
    manager.cache.evict([ids[2]])
    manager.invalidate([ids[1]])
    manager.step(new=[Request("b", range(12))])  # recomputes blocks 1 and 2
    assert hit_length(manager, range(17)) == 12  # block 3 was computed from the invalid block


def test_holders_of_blocks_computed_from_a_failed_block_are_reported():
    """When the failure is reported, no request holds the failed block any more."""
    manager = make(num_blocks=30)
    e, d = Request("e", range(5)), Request("d", range(9))
    manager.step(new=[e, d])  # both requests compute block 0, and lookups find e's copy first
    failed = int(manager.block_ids(d)[0])
    manager.free(d)
    c = Request("c", range(20))
    # The request hits e's block 0 and d's block 1, which was computed from the failed block.
    manager.step(new=[c])
    assert manager.invalidate([failed]) == {"c": 0, "e": 0}
    assert manager.pool.num_cached == 0


def test_requests_that_just_dropped_a_failed_page_are_reported():
    options = {"enable_caching": False, "num_preallocate_tokens": 0}
    manager = KVCacheManager(4, 30, 64, 4, **options)
    a = Request("a", range(40))
    manager.step(new=[Admit(a, num_tokens=8)])
    failed = int(manager.block_ids(a)[0])
    manager.step([0], [8])
    assert 0 in manager.block_ids(a).tolist()
    assert manager.report(StepReport(0, True, [failed])) == {"a": 0}


def test_row_does_not_continue_inside_a_block_it_has_dropped():
    groups = [GroupSpec("full_attention", 4), GroupSpec("chunked_local", 4, {"chunk_size": 10})]
    manager = KVCacheManager.for_groups(groups, 60, 64, num_preallocate_tokens=0)
    a = Request("a", range(40), write_cache=False, read_cache=False)
    manager.step(new=[Admit(a, num_tokens=10)])
    aborted = manager.step([0], [10])
    manager.step([0], [10])
    # The chunk attends to no token before token 10, but tokens 10 and 11 are written to a block
    # that starts before it.
    assert manager.abort(aborted.step_id) == {"a": 0}
    manager.step([0], [12])
    assert 0 not in manager.block_ids(a, 1).tolist()[2:]


def test_drafts_of_the_last_step_are_lost_with_the_failed_block():
    manager = make(num_blocks=30)
    a = Request("a", range(8))
    manager.step(new=[a])
    # The step computes token 8 and five drafts that are neither accepted nor rejected yet.
    manager.step([0], [6], token_ids=[8])
    failed = int(manager.block_ids(a)[3])
    assert manager.invalidate([failed]) == {"a": 8}
    manager.step([0], [1])
    assert manager.num_computed_tokens(a) == 9


def test_abort_affects_only_rows_served_by_the_step():
    manager = make(num_blocks=40)
    a, b = Request("a", range(22)), Request("b", range(22))
    manager.step(new=[a])
    plan = manager.step(new=[b])
    assert manager.abort(plan.step_id) == {"b": 20}
    assert manager.num_computed_tokens(a) == 22
    direct = Request("c", range(50, 70))
    plan = manager.step([0], [1])
    manager.admit(Admit(direct, num_tokens=20), ())
    assert manager.abort(plan.step_id) == {"a": 22}
    assert hit_length(manager, range(50, 70)) == 16


def test_siblings_of_a_failed_block_stay_cached():
    manager = make(num_blocks=30)
    trunk = list(range(8))
    for name, first in (("a", 10), ("b", 20)):
        manager.step(new=[Request(name, [*trunk, *range(first, first + 5)])])
    bad = manager.block_ids(Request("a", [1]))[2]
    assert manager.invalidate([bad]) == {"a": 8}
    assert hit_length(manager, [*trunk, *range(20, 25)]) == 12


@pytest.mark.parametrize("sizes", [(4, 4), (4, 8)])
def test_prompts_with_a_different_beginning_stay_cached(sizes):
    """If all groups have the same block size, the blocks before the failed block stay cached in its
    own prompt, too.
    """
    groups = [GroupSpec("full_attention", size) for size in sizes]
    manager = KVCacheManager.for_groups(groups, 60, 64, num_preallocate_tokens=0)
    prompts = [range(0, 17), range(100, 117)]
    requests = [Request(f"{prompt[0]}", prompt) for prompt in prompts]
    manager.step(new=requests)
    assert [hit_length(manager, prompt) for prompt in prompts] == [16, 16]
    bad = int(manager.block_ids(requests[0])[2])
    assert manager.invalidate([bad]) == {"0": 8}
    assert hit_length(manager, prompts[0]) == (8 if sizes == (4, 4) else 0)
    assert hit_length(manager, prompts[1]) == 16
    check_invariants(manager)


def test_failed_block_invalidates_smaller_blocks_computed_from_it():
    """The failed block covers two blocks of the other group, but is not part of that group's hash
    chain.
    """
    groups = [GroupSpec("full_attention", 4), GroupSpec("full_attention", 8)]
    manager = KVCacheManager.for_groups(groups, 60, 64, num_preallocate_tokens=0)
    request = Request("a", range(17))
    hashes = manager.cache.hashes(request)
    manager.step(new=[request])
    assert manager.cache.find(hashes).device.min() > 0
    bad = int(manager.block_ids(request, 1)[1])
    manager.free(request)
    assert manager.invalidate([bad]) == {}
    assert manager.cache.find(hashes).device.tolist()[2:] == [-1, -1]


def test_failed_page_of_one_group_invalidates_all_groups():
    groups = [GroupSpec("full_attention", 4), WINDOW]
    manager = KVCacheManager.for_groups(groups, 40, 64, num_preallocate_tokens=0)
    request = Request("a", range(9))
    manager.step(new=[request])
    affected = manager.report(StepReport(0, True, [int(manager.block_ids(request, 1)[1])]))
    assert affected == {"a": 4}
    assert manager.pool.num_cached == 2
    assert [len(manager.block_ids(request, g)) for g in (0, 1)] == [1, 1]


def test_row_without_its_window_restarts_from_the_cached_prefix():
    groups = [GroupSpec("full_attention", 4), WINDOW]
    manager = KVCacheManager.for_groups(groups, 60, 64, num_preallocate_tokens=0)
    request = Request("a", range(30))
    manager.step(new=[Admit(request, num_tokens=12)])
    for _ in range(3):
        manager.step([0], [4])
    bad = int(manager.block_ids(request, 0)[2])
    # Token 8 would attend to tokens 3 and later. The row has dropped the first blocks of that
    # window, but they are still cached.
    assert manager.invalidate([bad]) == {"a": 8}
    check_invariants(manager)
    assert manager.step([0], [4]).num_computed_tokens.tolist() == [8]


def test_row_does_not_resume_at_a_shorter_hit_whose_blocks_were_not_loaded():
    """The hit of 6 tokens ends at a 3-token chunk boundary, so it does not include the previous
    chunk.
    """
    groups = [GroupSpec("full_attention", 4), GroupSpec("chunked_local", 8, {"chunk_size": 3})]
    manager = KVCacheManager.for_groups(groups, 60, 64, num_preallocate_tokens=0, hash_block_size=1)
    manager.step(new=[Request("a", range(7))])
    request = Request("b", [*range(6), 90, 91], write_cache=False)
    assert manager.step(new=[request]).num_computed_tokens.tolist() == [6]
    assert manager.invalidate([int(manager.block_ids(request, 0)[1])]) == {"b": 0}


def test_row_returns_to_its_last_stored_state():
    groups = [GroupSpec("full_attention", 4), GroupSpec("recurrent", 4)]
    manager = KVCacheManager.for_groups(groups, 60, 64, num_preallocate_tokens=0)
    request = Request("a", range(30))
    manager.step(new=[Admit(request, num_tokens=8)])
    manager.step([0], [4])
    aborted = manager.step([0], [3])
    assert manager.abort(aborted.step_id) == {"a": 12}
    plan = manager.step([0], [1])
    assert plan.num_computed_tokens.tolist() == [12] and len(plan.copy) == 1


def hybrid(**options):
    groups = [GroupSpec("full_attention", 4), GroupSpec("recurrent", 4)]
    options = {"num_preallocate_tokens": 0, "fence_frees": True, **options}
    return KVCacheManager.for_groups(groups, 60, 64, **options)


def cached_blocks(manager, request):
    """Return the columns of the first group whose blocks are cached."""
    found = manager.cache.find(manager.cache.hashes(request)).device
    return [block for block, page in enumerate(found.tolist()) if page > 0]


def test_failed_state_invalidates_all_tokens_computed_with_it():
    """The step computed blocks 2 to 4 from the state. By the end of the step, the state's page
    belongs to block 4.
    """
    manager = hybrid()
    request = Request("a", range(24))
    plan = manager.step(new=[Admit(request, num_tokens=12, external=External(8))])
    page = int(manager.block_ids(request, 1)[4])
    assert cached_blocks(manager, request) == [0, 1, 2, 3, 4]
    assert manager.report(StepReport(plan.step_id, True, [page])) == {"a": 0}
    assert cached_blocks(manager, request) == [0, 1]


@pytest.mark.parametrize("leaves", [False, True], ids=["moves on", "leaves"])
def test_state_that_fails_after_its_release_invalidates_the_same_blocks(leaves):
    manager = hybrid()
    request = Request("a", range(24))
    manager.step(new=[Admit(request, num_tokens=8)])
    manager.report(StepReport(0, completed=True))
    plan = manager.step([0], [12])
    page = int(manager.block_ids(request, 1)[4])
    if leaves:
        manager.free(request)
    else:
        manager.step([0], [2])
    affected = manager.report(StepReport(plan.step_id, True, [page]))
    assert affected == ({} if leaves else {"a": 0})
    assert cached_blocks(manager, request) == [0, 1]


def test_hit_state_that_fails_before_it_is_read_rolls_its_row_back():
    manager = hybrid(num_host_blocks=30)
    request = Request("a", range(24))
    manager.step(new=[Admit(request, num_tokens=8)])
    manager.report(StepReport(0, completed=True))
    manager.free(request)
    other = Request("b", range(24))
    plan = manager.step(new=[Admit(other, num_tokens=4)])
    assert manager.abort(plan.step_id) == {"b": 8}
    page = int(manager.block_ids(other, 1)[1])
    plan = manager.step(swap_out=[0])
    assert manager.report(StepReport(plan.step_id, True, [page])) == {"b": 0}


def test_a_failed_page_of_an_encoder_that_was_swapped_out_restarts_the_request():
    groups = [GroupSpec("full_attention", 4), GroupSpec("cross_attention", 2)]
    manager = KVCacheManager.for_groups(groups, 60, 64, num_host_blocks=30)
    request = Request("a", range(5), num_encoder_tokens=10)
    manager.step(new=[request])
    page = int(manager.block_ids(request, 1)[4])
    plan = manager.step(swap_out=[0])
    assert manager.report(StepReport(plan.step_id, True, [page])) == {"a": 0}


def test_a_failed_page_of_an_encoder_restarts_the_request():
    """Found by a random run: the encoder's blocks were allocated twice."""
    groups = [GroupSpec("full_attention", 4), GroupSpec("cross_attention", 4)]
    manager = KVCacheManager.for_groups(groups, 20, 64, num_preallocate_tokens=0)
    request = Request("a", range(9), num_encoder_tokens=8)
    manager.step(new=[request])
    encoder = manager.block_ids(request, 1)
    assert manager.invalidate(encoder[:1]) == {"a": 0}
    assert manager.block_ids(request, 1).tolist() == encoder.tolist()
    check_invariants(manager)


def test_new_epoch_hides_cached_blocks_and_running_requests_cache_nothing():
    manager = make(num_blocks=30)
    old, running = Request("a", range(9)), Request("b", range(50, 59))
    manager.step(new=[old, running])
    manager.free(old)
    manager.cache.start_epoch()
    assert manager.pool.num_cached == 0 and hit_length(manager, range(9)) == 0
    manager.step([1], [4], token_ids=[59, 60, 61, 62], num_token_ids=[4])
    manager.free(running)
    assert manager.pool.num_cached == 0
    manager.step(new=[old])
    assert manager.pool.num_cached == 2
    check_invariants(manager)


def test_rows_reused_after_a_new_epoch_are_cached():
    """Found by a random run: rows that were not in use had been marked as stale, too."""
    manager = make()
    a = Request("a", range(9))
    manager.step(new=[a])
    manager.free(a)
    manager.cache.start_epoch()
    manager.step(new=[a])
    assert manager.pool.num_cached == 2


def test_blocks_that_all_running_requests_share_are_counted():
    manager = make(num_blocks=30)
    first = Request("a", range(14))
    manager.step(new=[first])
    manager.step(new=[Request("b", range(14)), Request("c", [*range(6), *range(50, 60)])])
    assert manager.cache.num_common_prefix_blocks(first, 3) == 1
    assert manager.cache.num_common_prefix_blocks(first, 2) == 0
    with pytest.raises(ValueError, match="num_running_requests is 0"):
        manager.cache.num_common_prefix_blocks(first, 0)
    with pytest.raises(ValueError, match="group is 1: expected 0 to 0"):
        manager.cache.num_common_prefix_blocks(first, 1, group=1)
    with pytest.raises(ValueError, match="request 'x' is not admitted"):
        manager.cache.num_common_prefix_blocks(Request("x", [1]), 1)


# Statistics and events ------------------------------------------------------------------------------


def test_statistics_count_in_total_recently_and_by_group():
    manager = make(num_blocks=30)
    for name in "abc":
        request = Request(name, range(9))
        manager.step(new=[request])
        manager.free(request)
    stats = manager.cache.stats
    assert (stats.num_requests, stats.query_tokens, stats.hit_tokens) == (3, 27, 16)
    assert (stats.recent.num_requests, stats.recent.hit_rate) == (3, 16 / 27)
    group = stats.groups[0]
    assert (group.query_blocks, group.hit_blocks, group.stored_blocks) == (6, 4, 2)
    assert group.hit_rate == 4 / 6
    manager.cache.clear_stats()
    assert manager.cache.stats.num_requests == manager.cache.stats.recent.num_requests == 0


def test_events_report_cached_blocks_in_order():
    manager = make(num_blocks=4, enable_events=True)
    a = Request("a", range(9))
    manager.step(new=[a])
    manager.free(a)
    manager.step(new=[Request("b", range(50, 58))])
    stored, removed, more = manager.cache.drain_events()
    hashes = hash_blocks(range(9), 4)
    assert isinstance(stored, BlockStored) and (stored.block_hashes == hashes).all()
    assert stored.parent_hash == hash_seed(DEFAULT_SEED, "seed")
    assert stored.token_ids.tolist() == list(range(8)) and stored.block_size == 4
    assert isinstance(removed, BlockRemoved) and (removed.block_hashes == hashes[1:]).all()
    assert isinstance(more, BlockStored) and more.token_ids.tolist() == list(range(50, 58))
    assert manager.cache.drain_events() == []


def test_second_copy_emits_no_event_but_a_reset_does():
    manager = make(num_blocks=30, enable_events=True)
    a, b = Request("a", range(9)), Request("b", range(9))
    manager.step(new=[a, b])
    assert len(manager.cache.drain_events()) == 1
    manager.cache.evict(manager.block_ids(a)[:2])
    assert manager.cache.drain_events() == []  # the second copy is still found
    manager.free(a)
    manager.free(b)
    manager.cache.reset()
    assert manager.cache.drain_events() == [AllBlocksCleared()]


def test_no_events_are_stored_if_events_are_disabled():
    manager = make()
    manager.step(new=[Request("a", range(9))])
    assert manager.cache.drain_events() == []


@pytest.mark.parametrize("by_step", [True, False])
@pytest.mark.parametrize(
    ("own", "of_call", "want"),
    [(True, False, 0), (False, None, 0), (False, True, 8), (True, None, 8)],
)
def test_restarted_row_reads_the_cache_if_its_admission_allowed_it(own, of_call, want, by_step):
    manager = KVCacheManager(4, 30, 100, num_preallocate_tokens=0)
    manager.step(new=[Request("first", range(12))])
    request = Request("r", range(12), read_cache=own)
    if by_step:
        plan = manager.step(new=[Admit(request, read_cache=of_call)])
        assert plan.num_computed_tokens.tolist() == [want]
    else:
        ids, num_hit, _ = manager.cache.find_prefix(request, read_cache=of_call)
        assert num_hit == want
        manager.admit(Admit(request, num_tokens=12 - num_hit, read_cache=of_call), ids)
    # Evict the request's own blocks by id, because their hashes would also match the first
    # request's blocks.
    manager.cache.evict(manager.block_ids(request)[want // 4 :])
    affected = manager.invalidate(manager.block_ids(request)[want // 4 :])
    assert affected == {"r": want}
    assert manager.cache.find_prefix(Request("x", range(12))).num_tokens == 8
    check_invariants(manager)


def test_restarted_fork_reads_the_cache_if_its_own_request_allows_it():
    manager = KVCacheManager(4, 30, 100, num_preallocate_tokens=0)
    manager.step(new=[Request("first", range(12))])
    parent = Request("p", range(12))
    manager.step(new=[Admit(parent, read_cache=False)])
    for child in (Request("reads", range(12)), Request("not", range(12), read_cache=False)):
        manager.fork(parent, child)
    own = manager.block_ids(parent)
    manager.cache.evict(own)
    assert manager.invalidate(own) == {"p": 0, "reads": 8, "not": 0}
    check_invariants(manager)


def test_blocks_are_free_after_all_steps_were_aborted_one_by_one():
    """Regression: the last step counted as issued although it was aborted, and kept its blocks."""
    manager = manager_of(GroupSpec("full_attention", 4), fence_frees=True)
    for name in ("a", "b"):
        request = Request(name, range(8))
        step = manager.step(new=[request]).step_id
        manager.free(request)
        manager.abort(step)
    assert manager.last_step_id == -1
    assert (manager.pool.num_fenced, manager.pool.num_free) == (0, manager.pool.num_total)


def test_blocks_freed_after_a_step_wait_for_the_report_of_that_step():
    manager = manager_of(GroupSpec("full_attention", 4), fence_frees=True)
    request = Request("a", range(8))
    first = manager.step(new=[request]).step_id
    second = manager.step([manager.row(request)], [1]).step_id
    manager.free(request)
    num_held = manager.pool.num_fenced
    manager.report(StepReport(first, completed=True))
    assert manager.pool.num_fenced == num_held == 3
    manager.report(StepReport(second, completed=True))
    assert (manager.pool.num_fenced, manager.pool.num_free) == (0, manager.pool.num_total)
