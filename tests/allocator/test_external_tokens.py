# SPDX-License-Identifier: Apache-2.0
"""External tokens, and blocks that a connector still uses after their request was freed."""

import pytest

from kvcache import Admit, External, GroupSpec, KVCacheManager, Request, Status, StepReport
from kvcache.allocator import RequestState, check_invariants
from tests.machinery.steps import FULL, go, hit, ids, new

RING = GroupSpec("circular_window", 4, {"window": 6, "buffer": 13}, cached=False)  # 16 slots


def make(num_blocks=21, groups=(FULL,), **options):
    options = {"num_preallocate_tokens": 0, **options}
    return KVCacheManager.for_groups(list(groups), num_blocks, 64, **options)


def receiver(manager, name="a", num_tokens=21, num_external=16, **options):
    request = Request(name, range(num_tokens))
    plan = manager.step(
        new=[Admit(request, external=External(num_external, delayed=True), **options)]
    )
    assert plan.status.tolist() == [Status.SERVED]
    return request, plan


def test_blocks_that_receive_no_external_kv_are_zeroed():
    own = GroupSpec("full_attention", 4, cached=False, transferred=False)
    for delays in (False, True):
        manager = make(26, [FULL, own])
        request = Request("b", range(20))
        ask = Admit(request, 0 if delays else 20, external=External(16, delayed=delays))
        plan = manager.step(new=[ask])
        assert plan.zero.tolist() == manager.block_ids(request, 1)[:4].tolist()


# Within a step -----------------------------------------------------------------------------------------


def test_external_tokens_follow_the_hit_and_are_cached_if_they_arrive():
    manager = make()
    a = new(manager, "a", 21, external=External(16))
    assert len(ids(manager, a)) == 6 and manager.num_computed_tokens(a) == 21
    assert hit(manager, 21) == 20
    lost = ids(manager, a)[2]
    report = StepReport(0, completed=True, failed_pages=[lost])
    assert manager.report(report) == {"a": 8} and hit(manager, 21) == 8
    b = new(manager, "b", 21, 1, external=External(10))
    assert manager.num_computed_tokens(b) == 8 + 10 + 1 and len(ids(manager, b)) == 5
    assert ids(manager, b)[:2] == ids(manager, a)
    assert manager.abort(1) == {"b": 8}
    manager = make()
    a = Request("a", range(21))
    pages = manager.admit(Admit(a, num_tokens=5, external=External(16)), ())
    assert pages.tolist() == [1, 2, 3, 4, 5, 6] and hit(manager, 21) == 20


# After the step ----------------------------------------------------------------------------------------


def test_blocks_of_a_receiver_are_not_hits_before_their_bytes_arrive():
    """The next plan can normally hit a prompt's blocks, but the bytes of these blocks arrive later."""
    manager = make()
    request, plan = receiver(manager)
    assert (plan.num_computed_tokens.tolist(), len(plan.append_ids[0])) == ([16], 4)
    assert manager.state(request) is RequestState.RECEIVING and hit(manager, 21) == 0
    assert manager.finish_receiving(request) == 16 and hit(manager, 21) == 16
    assert manager.state(request) is not RequestState.RECEIVING
    assert go(manager, request, 5).num_computed_tokens.tolist() == [16]
    assert hit(manager, 21) == 20
    manager = make()
    new(manager, "a", 8)
    request, plan = receiver(manager, "b", num_external=9)
    assert plan.num_computed_tokens.tolist() == [17]
    assert manager.finish_receiving(request, 0) == 8  # nothing arrived: back to the hit
    assert ids(manager, request) == [1, 2]


# Requests admitted one at a time -----------------------------------------------------------------------


# Kept blocks ----------------------------------------------------------------------------------------


def test_kept_blocks_stay_allocated_until_the_connector_releases_them():
    manager = make(num_blocks=4)
    request = Request("a", range(9))
    manager.step(new=[request])
    manager.free(request, keep_blocks=True)
    assert (manager.pool.num_kept, manager.pool.num_free) == (3, 0)
    assert hit(manager, 9) == 8
    assert manager.step(new=[Request("b", range(50, 54))]).status.tolist() == [Status.WAIT]
    assert not manager.cache.reset()
    with pytest.raises(
        ValueError, match=r"request 'b' are kept: expected a request that was freed"
    ):
        manager.release_blocks(Request("b", [1]))
    manager.release_blocks(request)
    assert (manager.pool.num_kept, manager.pool.num_free) == (0, 3)
    check_invariants(manager)


def test_only_blocks_with_content_are_held_and_only_held_blocks_are_released():
    manager = make(num_blocks=4)
    request = Request("a", range(9))
    manager.step(new=[request])
    first, second, last = manager.block_ids(request).tolist()
    manager.free(request)
    manager.hold_blocks([first])
    for call, blocks, message in (
        (manager.hold_blocks, [second, last], "which is free and not cached"),
        (manager.hold_blocks, [0], "ids holds block 0: expected 1 to 3"),
        (manager.release_blocks, [first, first], "more often than hold_blocks holds it"),
        (manager.release_blocks, [second], "expected 0 times at most"),
        (manager.release_blocks, [4], "blocks holds block 4: expected 1 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            call(blocks)
        assert (manager.pool.num_kept, manager.pool.num_free) == (1, 2)
        check_invariants(manager)
    for call in (manager.hold_blocks, manager.release_blocks):
        with pytest.raises(TypeError, match="has dtype <U5: expected integers"):
            call("first")
    manager.release_blocks([first])
    assert manager.pool.num_free == 3


@pytest.mark.parametrize("fence_frees", [False, True])
def test_blocks_of_untransferred_groups_are_released_immediately(fence_frees):
    own = GroupSpec("full_attention", 4, cached=False, transferred=False)
    manager = make(num_blocks=20, groups=(own, FULL, own), fence_frees=fence_frees)
    request = Request("a", range(9))
    plan = manager.step(new=[request])
    manager.free(request, keep_blocks=True)
    assert manager.pool.num_kept == 3
    assert manager.pool.num_fenced == (6 if fence_frees else 0)
    manager.report(StepReport(plan.step_id, True))
    assert (manager.pool.num_kept, manager.pool.num_free) == (3, 16)
    check_invariants(manager)
    assert hit(manager, 9) == 8  # still cached
    received = Request("b", range(50, 60))
    manager.step(new=[Admit(received, external=External(8, delayed=True))])
    manager.free(received, keep_blocks=True)
    assert manager.pool.num_kept == 5
    for each in (request, received):
        manager.release_blocks(each)
    check_invariants(manager)


def test_untransferred_cached_group_excludes_external_tokens():
    """The request's blocks in that group would otherwise be cached without valid KV."""
    own = GroupSpec("full_attention", 4, transferred=False)
    manager = make(groups=(FULL, own))
    request = Request("a", range(9))
    message = "external.num_tokens is 4: expected 0, because group 1 is cached but not"
    for call in (
        lambda: manager.step(new=[Admit(request, external=External(4))]),
        lambda: manager.would_fit(Admit(request, external=External(4))),
        lambda: manager.admit(Admit(request, num_tokens=1, external=External(4)), ()),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert manager.pool.num_free == 20
    manager.step(new=[request])
    check_invariants(manager)


def test_wrapped_circular_buffer_receives_the_last_external_tokens():
    """The buffer has 16 slots, and the step reads the last 5 of the 30 external tokens, so it may
    compute at most 11 tokens.
    """
    manager = make(num_blocks=40, groups=(RING, FULL))
    request, external = Request("a", range(60)), External(30)
    assert manager.would_fit(Admit(request, 11, external)) == Status.SERVED
    message = "a new request requests 12 slots including lookahead: expected at most 11"
    for ask in (Admit(request, 12, external), Admit(request, 9, external, num_lookahead_tokens=3)):
        with pytest.raises(ValueError, match=message):
            manager.step(new=[ask])
    plan = manager.step(new=[Admit(request, 11, external)])
    assert (plan.num_computed_tokens.tolist(), plan.num_tokens.tolist()) == ([30], [11])
    assert len(manager.block_ids(request)) == 4


# Invalid calls, which change nothing -------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "error"), [
    ({"external": External(13)}, r"is 13: expected at most 12, because the request"),
    ({"external": External(-1)}, r"external.num_tokens is -1: expected 0"),
    ({"external": External(0, delayed=True)}, r"external.num_tokens is 0: expected 1 or more"),
    ({"external": External(4, delayed=True), "num_tokens": 3}, "is 3: expected 0 with external"),
])  # fmt: skip
def test_invalid_counts_are_rejected(arguments, error):
    manager = make()
    manager.step(new=[Request("a", range(8))])
    with pytest.raises(ValueError, match=error):
        manager.step([0], [1], token_ids=[9], new=[Admit(Request("b", range(21)), **arguments)])
    assert (manager.pool.num_free, manager._native.num_rows) == (18, 1)
    assert manager.step([0], [1]).step_id == 1


def test_invalid_types_are_rejected_by_name():
    manager, request = make(), Request("a", range(9))
    for ask, message in (
        (
            Admit(request, external=External(0, delayed=1)),
            "external.delayed is 1: expected True or",
        ),
        (Admit(request, read_cache="no"), "read_cache is 'no': expected True or False"),
        (Admit(request, external=4), "external is 4: expected an External or None"),
        (Admit(request, [1, 2]), r"num_tokens is \[1, 2\]: expected an integer"),
    ):
        with pytest.raises(TypeError, match=rf"^new\[0\].{message}"):
            manager.step(new=[ask])
    manager.step(new=[request])
    with pytest.raises(TypeError, match=r"keep_blocks is 'yes': expected True or False"):
        manager.free(request, keep_blocks="yes")
    assert manager.num_computed_tokens(request) == 9


def test_receiving_request_is_not_served_forked_swapped_out_or_admitted_again():
    manager = make(num_host_blocks=9)
    request, _ = receiver(manager)
    receiving = "row 0 is receiving external tokens: expected a call"
    for call, message in (
        (lambda: manager.step([0], [1]), receiving),
        (lambda: manager.step(swap_out=[0]), receiving),
        (lambda: manager.fork(request, Request("b", range(21))), receiving),
        (
            lambda: manager.step(new=[Admit(request, external=External(4))]),
            "'a' is already admitted",
        ),
        (
            lambda: manager.finish_receiving(request, 17),
            "is 17: expected 0 to 16, the external tok",
        ),
        (lambda: manager.finish_receiving(request, -1), "num_tokens is -1: expected 0 to 16"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert manager.finish_receiving(request) == 16
    with pytest.raises(ValueError, match="row 0 is not receiving: expected a request that was adm"):
        manager.finish_receiving(request)
    alone = Request("alone", range(50, 71))
    manager.admit(Admit(alone, external=External(12, delayed=True)), ())
    with pytest.raises(ValueError, match="row 1 is receiving external tokens: expected a call"):
        manager.extend(alone, 1)
    assert manager.finish_receiving(alone) == 12 and manager.extend(alone, 1) is not None


def test_rows_that_receive_or_are_swapped_out_can_only_be_freed_in_one_way():
    manager = make(num_host_blocks=9)
    receives, _ = receiver(manager)
    with pytest.raises(ValueError, match=r"row 0 is receiving external tokens: expected a call to"):
        manager.free(receives)
    manager.free(receives, keep_blocks=True)
    assert (manager.pool.num_kept, hit(manager, 21)) == (4, 0)
    manager.release_blocks(receives)
    assert manager.pool.num_free == 20
    a = new(manager, "a", 9)
    manager.step(swap_out=[0])
    with pytest.raises(ValueError, match=r"row 0 is swapped out: expected one on the device"):
        manager.free(a, keep_blocks=True)
    go(manager, a, 1)
    manager.free(a, keep_blocks=True)
    manager.step(new=[a])
    with pytest.raises(
        ValueError, match=r"blocks of request 'a' are already kept: expected a call"
    ):
        manager.free(a, keep_blocks=True)


def test_external_tokens_need_read_cache():
    """A request that computes all of its tokens takes neither cached blocks nor external tokens."""
    manager = make()
    expected = "external.num_tokens is 8, but the request has read_cache=False: expected 0"
    for request, reads in (
        (Request("a", range(20)), False),
        (Request("b", range(20), read_cache=False), None),
        (Request("c", range(20), num_encoder_tokens=4), None),
    ):
        ask = Admit(request, external=External(8, delayed=reads is None), read_cache=reads)
        for call, given in ((manager.admit, ask), (manager.would_fit, ask)):
            with pytest.raises(ValueError, match=expected):
                call(given)
        with pytest.raises(ValueError, match=expected):
            manager.step(new=[ask])
    ask = Admit(Request("d", range(20), read_cache=False), external=External(8), read_cache=True)
    assert manager.step(new=[ask]).num_computed_tokens.tolist() == [8]
